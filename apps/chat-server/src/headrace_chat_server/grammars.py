"""Grammars of requests, compiled in the engine for its model's tokenizer."""

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from headrace_models import Codec
    from headrace_sampling import GrammarCompiler, GrammarState

__all__ = ["compile_grammar"]

_lock = threading.Lock()
# One per engine: making a compiler reads the whole vocabulary, which takes up to seconds.
_compilers: "WeakKeyDictionary[Codec, GrammarCompiler]" = WeakKeyDictionary()


def compile_grammar(loaded: Any, spec: Any) -> "GrammarState":
    """Compile a `GrammarSpec` for one row of a loaded model. Called on a worker thread of the engine.

    Raises:
        InvalidGrammar: with the compiler's reason.
    """
    return _compiler_of(loaded).compile(spec)


def _compiler_of(loaded: Any) -> "GrammarCompiler":
    from headrace_sampling import GrammarCompiler, TokenizerFacts

    codec, config = loaded.codec, loaded.model.config
    with _lock:
        compiler = _compilers.get(codec)
        if compiler is None:
            facts = TokenizerFacts(
                vocab_size=config.vocab_size,
                eos_token_ids=tuple(sorted(config.eos_token_ids)),
                tokenizer_json=codec.tokenizer_json(),
            )
            compiler = _compilers[codec] = GrammarCompiler(facts)
    return compiler
