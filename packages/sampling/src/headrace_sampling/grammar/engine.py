"""llguidance behind its extra: how it is imported, its limits, and the stack that it needs."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from attrs import define, field

from headrace_sampling.errors import GrammarUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import LLParserLimits, LLTokenizer

T = TypeVar("T")

# llguidance's parsers recurse, about a kilobyte per character at worst, and overflow kills the process.
_STACK_BYTES = 2**28
_stack_lock = threading.Lock()


def require_llguidance() -> None:
    """Raise `GrammarUnavailable` if llguidance is not installed; after that it can be imported."""
    if find_spec("llguidance") is None or find_spec("numpy") is None:
        raise GrammarUnavailable


def parser_limits() -> LLParserLimits:
    """Return the default limits, with error messages that quote neither the grammar nor the reply."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def on_deep_stack(work: Callable[[], T]) -> T:
    """Run work on a thread whose stack is deep enough for any grammar of the allowed length, and wait for it."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001
            failure.append(error)

    with _stack_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="headrace-grammar")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if failure:
        raise failure.pop()
    return outcome[0]


def make_tokenizer(tokens: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int]) -> LLTokenizer:
    """Make a tokenizer of llguidance from the bytes of each token; it splits text greedily, longest token first."""
    from llguidance import LLTokenizer, TokenizerWrapper

    plain = _TokenTable(tokens=list(tokens), special_token_ids=sorted(special_ids), eos_token_id=eos_ids[0])
    return LLTokenizer(TokenizerWrapper(plain), eos_token=list(eos_ids))


@define
class _TokenTable:
    """A vocabulary in the shape that llguidance reads."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None
    _ids: dict[bytes, int] = field(factory=dict, init=False)
    _longest: int = field(default=1, init=False)

    def __attrs_post_init__(self) -> None:
        special = set(self.special_token_ids)
        for token_id, text in enumerate(self.tokens):
            if text and token_id not in special:
                self._ids.setdefault(text, token_id)
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        rest = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        start = 0
        while start < len(rest):
            for size in range(min(self._longest, len(rest) - start), 0, -1):
                token_id = self._ids.get(rest[start : start + size])
                if token_id is not None:
                    ids.append(token_id)
                    start += size
                    break
            else:
                # A byte that no token has: whatever follows cannot be written either.
                break
        return ids


def first_lines(message: str) -> str:
    """Shorten a message of llguidance to what it says, without the quoted grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("error:")]
    head = lines[0] if lines else "unknown reason"
    shown = f"{head} {reasons[-1]}" if reasons else head
    return shown if len(shown) <= 300 else f"{shown[:297]}..."
