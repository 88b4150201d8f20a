"""Keys and values of the decoder: per layer those of the audio, made once per window, and those of the tokens.

Rows are candidates, groups are windows: all candidates of a window attend to one copy of its audio. Rows are
left-aligned; each writes at its own end, and columns past a row's end are never attended to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AudioKeys", "DecoderState", "TokenKeys", "join_audio"]

_STEP = 64


@frozen(eq=False)
class AudioKeys:
    """Cross-attention keys and values of windows: per layer two arrays `(G, H, N, D)`."""

    layers: tuple[tuple[mx.array, mx.array], ...]

    @property
    def num_groups(self) -> int:
        return self.layers[0][0].shape[0]

    @property
    def num_positions(self) -> int:
        return self.layers[0][0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def take(self, groups: Sequence[int]) -> AudioKeys:
        """Return the windows `groups`, as copies."""
        picked = mx.array(list(groups))
        return AudioKeys(tuple((keys[picked], values[picked]) for keys, values in self.layers))

    def window(self, group: int) -> AudioKeys:
        """Return one window as a view."""
        return AudioKeys(tuple((k[group : group + 1], v[group : group + 1]) for k, v in self.layers))


def join_audio(windows: Sequence[AudioKeys]) -> AudioKeys:
    """Put windows into one batch; a single one is taken as it is."""
    if len(windows) == 1:
        return windows[0]
    return AudioKeys(
        tuple(
            (mx.concatenate([pair[0] for pair in layer]), mx.concatenate([pair[1] for pair in layer]))
            for layer in zip(*(window.layers for window in windows), strict=True)
        )
    )


@define(eq=False)
class TokenKeys:
    """Self-attention keys and values of one layer: `(R, H, C, D)`, with capacity C growing in steps of 64."""

    keys: mx.array
    values: mx.array

    def append(self, keys: mx.array, values: mx.array, ends: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Write `(R, H, T, D)` behind each row's end; returns the columns that some row may attend to."""
        count = keys.shape[2]
        reach = max(ends) + count
        self._reserve(reach)
        if min(ends) == max(ends):
            start = ends[0]
            self.keys[:, :, start:reach] = keys
            self.values[:, :, start:reach] = values
        else:
            columns = mx.array(list(ends))[:, None] + mx.arange(count)
            columns = columns[:, None, :, None]
            self.keys = mx.put_along_axis(self.keys, columns, keys, axis=2)
            self.values = mx.put_along_axis(self.values, columns, values, axis=2)
        return self.keys[:, :, :reach], self.values[:, :, :reach]

    def take(self, rows: mx.array) -> None:
        """Keep the rows `rows (R',)`, in that order; a row may be taken more than once."""
        self.keys, self.values = self.keys[rows], self.values[rows]

    def _reserve(self, reach: int) -> None:
        rows, heads, capacity, size = self.keys.shape
        if reach > capacity:
            more = mx.zeros((rows, heads, -(-reach // _STEP) * _STEP - capacity, size), self.keys.dtype)
            self.keys = mx.concatenate([self.keys, more], axis=2)
            self.values = mx.concatenate([self.values, more], axis=2)


@define(eq=False)
class DecoderState:
    """What a batch of rows has been fed: the audio's keys, the tokens' keys, and where each row ends."""

    audio: AudioKeys
    tokens: tuple[TokenKeys, ...]
    ends: list[int]
    """Positions written, per row."""
    _num_candidates: int = field(default=1)

    @classmethod
    def empty(cls, audio: AudioKeys) -> DecoderState:
        """Start one row per window."""
        rows = audio.num_groups

        def none(keys: mx.array) -> mx.array:
            return mx.zeros((rows, keys.shape[1], 0, keys.shape[3]), keys.dtype)

        return cls(audio, tuple(TokenKeys(none(keys), none(keys)) for keys, _ in audio.layers), [0] * rows)

    @property
    def num_rows(self) -> int:
        return len(self.ends)

    @property
    def num_candidates(self) -> int:
        """Rows per window."""
        return self._num_candidates

    def repeat(self, count: int) -> None:
        """Make `count` rows of each row, side by side."""
        self._num_candidates *= count
        self._take_rows([row for row in range(self.num_rows) for _ in range(count)])

    def reorder(self, sources: Sequence[int]) -> None:
        """Make row i go on from row `sources[i]` of the same window."""
        if list(sources) != list(range(self.num_rows)):
            self._take_rows(sources)

    def keep(self, groups: Sequence[int]) -> None:
        """Go on with the windows `groups` alone."""
        self.audio = self.audio.take(groups)
        count = self._num_candidates
        self._take_rows([group * count + candidate for group in groups for candidate in range(count)])

    def _take_rows(self, rows: Sequence[int]) -> None:
        self.ends = [self.ends[row] for row in rows]
        picked = mx.array(list(rows))
        for layer in self.tokens:
            layer.take(picked)
