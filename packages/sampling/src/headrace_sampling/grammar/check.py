"""Whether a grammar can be used, found out without a model: for the process that answers requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_sampling.errors import GrammarFailed, InvalidGrammar
from headrace_sampling.grammar.engine import (
    first_lines,
    make_tokenizer,
    on_deep_stack,
    parser_limits,
    require_llguidance,
)
from headrace_sampling.grammar.translate import to_llguidance

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from headrace_sampling.grammar.spec import GrammarSpec

_REMEDIES = {
    "text": "report it",
    "json_schema": "use the keywords that the page on structured output lists",
    "json_object": "report it",
    "regex": "use the syntax of Rust's regex crate, without look-around and back-references",
    "choice": "use fewer or shorter choices",
    "lark": "use llguidance's dialect of Lark, with a rule start",
    "ebnf": "use GBNF with a rule root",
    "structural_tag": "correct the tag's content",
}

_DEAD_END = "no text matches it from here on"


def check_grammar(spec: GrammarSpec) -> None:
    """Refuse what cannot be compiled or matches nothing. Takes milliseconds; meant for a worker thread.

    Special tokens that a Lark grammar names are unknown here and checked when it is compiled for a model.

    Raises:
        InvalidGrammar: with the compiler's reason.
        GrammarUnavailable: the extra `grammar` is not installed.
    """
    require_llguidance()
    on_deep_stack(lambda: _check(spec))


def open_matcher(spec: GrammarSpec, grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a grammar, on a deep stack, and see that its first step goes.

    Raises:
        InvalidGrammar: with the compiler's reason.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise _refusal(spec, matcher.get_error())
    matcher.compute_bitmask()
    try:
        check_alive(matcher)
    except GrammarFailed as error:
        raise _refusal(spec, error.reason) from None
    return matcher


def check_alive(matcher: LLMatcher) -> None:
    """Raise `GrammarFailed` if a matcher has failed, or has stopped where its grammar may not end."""
    if matcher.is_error():
        message = matcher.get_error()
        raise GrammarFailed(_DEAD_END if message.startswith("NoExtension") else first_lines(message))
    if matcher.is_stopped() and not matcher.is_accepting():
        raise GrammarFailed(_DEAD_END)


def _check(spec: GrammarSpec) -> None:
    from llguidance import LLMatcher

    grammar = to_llguidance(spec, {})
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if is_error:
        raise _refusal(spec, messages[0])
    # A warning is about special tokens, which no tokenizer of bytes has.
    if not messages:
        open_matcher(spec, grammar, make_tokenizer([*(bytes([one]) for one in range(256)), b"<eos>"], [256], [256]))


def _refusal(spec: GrammarSpec, message: str) -> InvalidGrammar:
    return InvalidGrammar(spec.kind, first_lines(message), _REMEDIES[spec.kind])
