"""Which tokens may come next, for all rows of a batch at once, on the device (openai/whisper, `decoding.py`).

Timestamps come in pairs, do not decrease, give each segment a length, and win when all of them together are likelier
than any text. mlx-whisper's form of the rules compares positions where OpenAI's compares times; these are OpenAI's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from attrs import define, evolve, field, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_models.whisper.special import SpecialTokens
    from headrace_models.whisper.tokenizer import WhisperTokenizer

__all__ = ["RowRules", "TokenRules"]

_SECONDS_PER_TIMESTAMP = 0.02


@frozen(kw_only=True)
class TokenRules:
    """What decides about tokens, apart from what a row has written. Rows of equal rules may share a batch."""

    special: SpecialTokens = field(eq=False)
    suppressed: tuple[int, ...]
    """Never written."""
    suppressed_first: tuple[int, ...]
    """Not written first: the blank and the end."""
    with_timestamps: bool
    max_initial_timestamp: int | None
    """The latest timestamp that may come first, in steps of 20 ms."""

    @classmethod
    def make(
        cls,
        tokenizer: WhisperTokenizer,
        *,
        suppress: Sequence[int] | None = None,
        suppress_blank: bool = True,
        with_timestamps: bool = True,
        max_initial_timestamp_s: float | None = 1.0,
    ) -> TokenRules:
        """Make the rules of a decoding.

        Args:
            suppress: token ids; None means what nobody says, `WhisperTokenizer.non_speech_tokens`. The special tokens
                that start transcripts are never written.
        """
        special = tokenizer.special
        chosen = tokenizer.non_speech_tokens if suppress is None else suppress
        starts = (special.translate, special.transcribe, special.sot, special.sot_prev, special.sot_lm)
        latest = None if max_initial_timestamp_s is None else round(max_initial_timestamp_s / _SECONDS_PER_TIMESTAMP)
        return cls(
            special=special,
            suppressed=tuple(sorted({*chosen, *starts, special.no_speech})),
            suppressed_first=(*tokenizer.encode(" "), special.eot) if suppress_blank else (),
            with_timestamps=with_timestamps,
            max_initial_timestamp=latest,
        )


@define(eq=False)
class RowRules:
    """The rules applied to R rows, with what they need of each row's past: `(R, 1)` arrays on the device."""

    _rules: TokenRules
    _always: mx.array
    """`(V,)`, 0 or minus infinity."""
    _first: mx.array
    _last_is_stamp: mx.array
    _before_is_stamp: mx.array
    _latest: mx.array
    """The last timestamp written, -1 for none."""
    _is_first: bool = True

    @classmethod
    def start(cls, rules: TokenRules, num_rows: int) -> RowRules:
        """Begin rows that have written nothing."""
        always = np.zeros(rules.special.vocab_size, np.float32)
        always[list(rules.suppressed)] = -np.inf
        if rules.with_timestamps:
            always[rules.special.no_timestamps] = -np.inf
        first = always.copy()
        first[list(rules.suppressed_first)] = -np.inf
        # A missing token before the first counts as a timestamp: text must follow a lone first one.
        stamp = mx.ones((num_rows, 1), mx.bool_)
        return cls(rules, mx.array(always), mx.array(first), stamp, stamp, mx.full((num_rows, 1), -1, mx.int32))

    def apply(self, logits: mx.array) -> mx.array:
        """Return logits `(R, V)` float32 with minus infinity for what may not come next."""
        logits = logits + (self._first if self._is_first else self._always)
        if not self._rules.with_timestamps:
            return logits
        special = self._rules.special
        text, others, stamps = mx.split(logits, [special.eot, special.timestamp_begin], axis=-1)
        index = mx.arange(special.num_timestamps)
        if self._is_first:
            if self._rules.max_initial_timestamp is not None:
                stamps = mx.where(index > self._rules.max_initial_timestamp, -mx.inf, stamps)
            return mx.concatenate([mx.full_like(text, -mx.inf), mx.full_like(others, -mx.inf), stamps], axis=-1)
        is_open = self._last_is_stamp & ~self._before_is_stamp
        is_closed = self._last_is_stamp & self._before_is_stamp
        # The second of a pair may equal the first; a segment's end may not equal its start.
        lowest = self._latest + mx.where(is_open, 0, 1)
        stamps = mx.where(is_closed | (index < lowest), -mx.inf, stamps)
        best_text = mx.where(is_open, -mx.inf, text.max(axis=-1, keepdims=True))
        best = mx.maximum(best_text, others.max(axis=-1, keepdims=True))
        highest = stamps.max(axis=-1, keepdims=True)
        together = mx.where(highest == -mx.inf, -mx.inf, mx.logsumexp(stamps, axis=-1, keepdims=True))
        is_stamp = together > best
        text = mx.where(is_open | is_stamp, -mx.inf, text)
        return mx.concatenate([text, mx.where(is_stamp, -mx.inf, others), stamps], axis=-1)

    def advance(self, tokens: mx.array) -> None:
        """Note the tokens `(R,)` that the rows wrote."""
        stamps = tokens.astype(mx.int32)[:, None] - self._rules.special.timestamp_begin
        self._before_is_stamp = self._last_is_stamp
        self._last_is_stamp = stamps >= 0
        self._latest = mx.where(self._last_is_stamp, stamps, self._latest)
        self._is_first = False

    def ahead(self, drafts: mx.array) -> RowRules:
        """Return the rules of `R * (T + 1)` rows: each row behind none, one and so on to all of its drafts `(R, T)`.

        They hold as far as the drafts follow the rules; there timestamps do not decrease.
        """
        stamps = drafts.astype(mx.int32) - self._rules.special.timestamp_begin
        last = mx.concatenate([self._last_is_stamp, stamps >= 0], axis=1)
        before = mx.concatenate([self._before_is_stamp, last[:, :-1]], axis=1)
        latest = mx.cummax(mx.concatenate([self._latest, mx.maximum(stamps, -1)], axis=1), axis=1)
        return evolve(
            self,
            last_is_stamp=last.reshape(-1, 1),
            before_is_stamp=before.reshape(-1, 1),
            latest=latest.reshape(-1, 1),
        )

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order; a row may be taken more than once."""
        picked = mx.array(list(rows))
        self._last_is_stamp, self._before_is_stamp, self._latest = (
            array[picked] for array in (self._last_is_stamp, self._before_is_stamp, self._latest)
        )
