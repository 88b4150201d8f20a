"""Grammars compiled for one tokenizer, each once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Self

from attrs import frozen

from headrace_sampling.errors import InvalidGrammar
from headrace_sampling.grammar.check import open_matcher
from headrace_sampling.grammar.controller import GrammarController, GrammarVocabulary, mask_of
from headrace_sampling.grammar.engine import make_tokenizer, on_deep_stack, require_llguidance
from headrace_sampling.grammar.prefix import FreePrefix
from headrace_sampling.grammar.translate import to_llguidance
from headrace_sampling.grammar.worker import MaskWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher, LLTokenizer

    from headrace_sampling.grammar.spec import GrammarSpec


@frozen(kw_only=True)
class TokenizerFacts:
    """What grammars need to know of a tokenizer, as plain data. Picklable.

    Attributes:
        vocab_size: V of the model's logits; ids from the tokenizer's end to V are always closed.
        eos_token_ids: tokens that end a reply.
        tokens: the bytes of each token, empty for one that stands for none. Or give `tokenizer_json`.
        special_token_ids: tokens that never stand for their text, for example markers of a chat template.
        tokenizer_json: the tokenizer of the tokenizers library as JSON text. Preferred: forced text is then split into
            the tokens that the model was trained on, and not greedily.

    Raises:
        ValueError: neither or both of `tokens` and `tokenizer_json`, no EOS, or an id outside the vocabulary.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokens: tuple[bytes, ...] = ()
    special_token_ids: tuple[int, ...] = ()
    tokenizer_json: str | None = None

    def __attrs_post_init__(self) -> None:
        if bool(self.tokens) == (self.tokenizer_json is not None):
            raise ValueError("tokens and tokenizer_json: exactly one of them must be given")
        if len(self.tokens) > self.vocab_size:
            raise ValueError(f"tokens are {len(self.tokens)}; there must be at most vocab_size, {self.vocab_size}")
        for name, ids in (("eos_token_ids", self.eos_token_ids), ("special_token_ids", self.special_token_ids)):
            if any(not 0 <= token_id < (len(self.tokens) or self.vocab_size) for token_id in ids):
                raise ValueError(f"{name} is {ids!r}; they must be ids of the tokenizer")
        if not self.eos_token_ids:
            raise ValueError("eos_token_ids is empty; a grammar needs a token that ends the reply")


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the last ones. Any thread may compile; a context manager.

    Making one reads the whole vocabulary: half a second for 49,152 tokens, up to ten for 262,144 (2-core CPU).

    Args:
        facts: of the tokenizer.
        cache_size: how many compiled grammars are kept.

    Raises:
        GrammarUnavailable: the extra `grammar` is not installed.
        ValueError: the tokenizer cannot be read.
    """

    def __init__(self, facts: TokenizerFacts, *, cache_size: int = 128) -> None:
        require_llguidance()
        if type(cache_size) is not int or cache_size < 0:
            raise ValueError(f"cache_size is {cache_size!r}; it must be an integer from 0")
        self.facts = facts
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, tuple[LLMatcher, FreePrefix | None]] = OrderedDict()
        self._tokenizer = _read_tokenizer(facts)
        self._tokens: Sequence[bytes] = facts.tokens or _token_bytes(self._tokenizer)
        special = _special_ids(self._tokenizer)
        self._special = {self._tokens[one].decode("utf-8", "replace"): one for one in special if self._tokens[one]}
        self._vocabulary = _vocabulary(facts, self._tokens)

    def compile(self, spec: GrammarSpec) -> GrammarController:
        """Return a fresh controller for one row; an equal spec is compiled once.

        Raises:
            InvalidGrammar: with the compiler's reason.
        """
        with self._lock:
            entry = self._compiled.get(spec)
            if entry is not None:
                self._compiled.move_to_end(spec)
        if entry is None:
            # Not under the lock: two threads may compile the same grammar, but none waits for another's.
            entry = on_deep_stack(lambda: self._build(spec))
            with self._lock:
                self._compiled[spec] = entry
                while len(self._compiled) > self._cache_size:
                    self._compiled.popitem(last=False)
        matcher, prefix = entry
        with self._lock:
            # A matcher may be read by one thread at a time.
            return GrammarController(
                matcher.deep_copy(),
                self._vocabulary,
                prefix,
                free_limit=spec.free_limit,
                takes_any=spec.kind == "text",
            )

    def close(self) -> None:
        """End the thread that computes masks; idempotent."""
        self._vocabulary.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, spec: GrammarSpec) -> tuple[LLMatcher, FreePrefix | None]:
        matcher = open_matcher(spec, to_llguidance(spec, self._special), self._tokenizer)
        return matcher, self._prefix(spec.free_until)

    def _prefix(self, marker: str | tuple[int, ...] | None) -> FreePrefix | None:
        if marker is None:
            return None
        if isinstance(marker, str):
            return FreePrefix(marker.encode(), self._tokens)
        if any(token_id >= len(self._tokens) for token_id in marker):
            raise InvalidGrammar("free_until", "it has ids outside the vocabulary", "give ids of the model's tokens")
        return FreePrefix(marker)


def compile_grammar(spec: GrammarSpec, compiler: GrammarCompiler) -> GrammarController:
    """Compile a grammar for one row, as `GrammarCompiler.compile`.

    Raises:
        InvalidGrammar: with the compiler's reason.
    """
    return compiler.compile(spec)


def _read_tokenizer(facts: TokenizerFacts) -> LLTokenizer:
    from llguidance import LLTokenizer

    if facts.tokenizer_json is None:
        special = {*facts.special_token_ids, *facts.eos_token_ids}
        return make_tokenizer(facts.tokens, sorted(special), facts.eos_token_ids)
    return LLTokenizer(facts.tokenizer_json, eos_token=list(facts.eos_token_ids))


def _token_bytes(tokenizer: LLTokenizer) -> list[bytes]:
    return [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]


def _special_ids(tokenizer: LLTokenizer) -> list[int]:
    return [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_special_token(token_id)]


def _vocabulary(facts: TokenizerFacts, tokens: Sequence[bytes]) -> GrammarVocabulary:
    size = max(facts.vocab_size, len(tokens))
    return GrammarVocabulary(
        vocab_size=facts.vocab_size,
        num_tokens=min(len(tokens), facts.vocab_size),
        eos_ids=frozenset(facts.eos_token_ids),
        ends=mask_of(facts.eos_token_ids, size),
        written=mask_of((one for one, text in enumerate(tokens[: facts.vocab_size]) if text), size),
        worker=MaskWorker(-(-len(tokens) // 32)),
    )
