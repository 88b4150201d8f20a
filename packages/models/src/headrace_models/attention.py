"""The attention block of the dense families: fused projections, head norms, rope, window and soft-cap.

B rows, T positions, H heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define

from headrace_kvcache import attend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from headrace_models.layers import Norm, Projection

__all__ = ["Attention", "EachHeadNorm", "WholeNorm"]


@define
class EachHeadNorm:
    """Root mean square norm of every query and key head by itself; queries and keys are normed in one call."""

    gains: mx.array
    """`(Hq + Hk, 1, D)`."""
    epsilon: float

    @classmethod
    def from_parts(
        cls, query_gain: mx.array, key_gain: mx.array | None, *, num_heads: int, num_kv_heads: int, epsilon: float
    ) -> EachHeadNorm:
        """Repeat the gains `(D,)` for every head; without keys there is no gain of theirs."""
        gains = mx.tile(query_gain, (num_heads, 1, 1))
        if key_gain is not None:
            gains = mx.concatenate([gains, mx.tile(key_gain, (num_kv_heads, 1, 1))])
        return cls(gains, epsilon)

    def __call__(self, heads: mx.array) -> mx.array:
        """Norm `(B, Hq + Hk, T, D)`."""
        return mx.fast.rms_norm(heads, None, self.epsilon) * self.gains

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield self.gains


@define
class WholeNorm:
    """Norms over all query heads together and over all key heads together."""

    queries: Norm
    keys: Norm

    def __call__(self, qkv: mx.array) -> mx.array:
        """Norm the first two parts of `(B, T, (Hq + 2 Hk) D)`."""
        num_queries, num_keys = self.queries.gain.size, self.keys.gain.size
        queries, keys, values = mx.split(qkv, [num_queries, num_queries + num_keys], axis=-1)
        return mx.concatenate([self.queries(queries), self.keys(keys), values], axis=-1)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield from self.queries.arrays()
        yield from self.keys.arrays()


@define(kw_only=True)
class Attention:
    """Grouped-query attention; q, k and v are one product."""

    qkv: Projection
    """Of queries, keys and values; without values where keys are the values, queries alone where KV is shared."""
    out: Projection
    num_heads: int
    num_kv_heads: int
    """Heads of the keys that it makes; 0 where the cache holds those of another layer."""
    scale: float
    window: int | None
    softcap: float | None
    rope_index: int | None
    """Which of the step's rotations turns queries and keys; None for none."""
    each_head_norm: EachHeadNorm | None
    whole_norm: WholeNorm | None
    has_values: bool = True
    """Whether values have a projection; otherwise the projected keys are the values too."""
    value_norm_epsilon: float | None = None
    """Of the values' norm, which has no gain; None for no norm."""

    def __call__(self, x: mx.array, cache: Any, rotations: Sequence[Callable[[mx.array], mx.array]]) -> mx.array:
        rows, num_tokens, _ = x.shape
        qkv = self.qkv(x)
        if self.whole_norm is not None:
            qkv = self.whole_norm(qkv)
        heads = _split_heads(qkv, self.num_heads + self.num_kv_heads * (1 + self.has_values))
        rotated, values = self._part_values(heads)
        if self.each_head_norm is not None:
            rotated = self.each_head_norm(rotated)
        if self.rope_index is not None:
            rotated = rotations[self.rope_index](rotated)
        queries, keys = mx.split(rotated, [self.num_heads], axis=1) if self.num_kv_heads else (rotated, None)
        attended = attend(
            cache,
            queries,
            keys,
            values,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        if num_tokens > 1:
            attended = attended.transpose(0, 2, 1, 3)
        return self.out(attended.reshape(rows, num_tokens, -1))

    def _part_values(self, heads: mx.array) -> tuple[mx.array, mx.array | None]:
        """Return the heads that are rotated, and the values; None where the cache holds those of another layer."""
        if not self.num_kv_heads:
            return heads, None
        rotated, values = mx.split(heads, [heads.shape[1] - self.num_kv_heads], axis=1)
        if not self.has_values:
            rotated = heads  # the projected keys, which are the last heads, stand for the values too
        if self.value_norm_epsilon is not None:
            values = mx.fast.rms_norm(values, None, self.value_norm_epsilon)
        return rotated, values

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        for part in (self.qkv, self.out, self.each_head_norm, self.whole_norm):
            if part is not None:
                yield from part.arrays()


def _split_heads(fused: mx.array, num_heads: int) -> mx.array:
    """`(B, T, H * D)` to `(B, H, T, D)`; for one token no transpose, which would cost a primitive per layer."""
    rows, num_tokens, _ = fused.shape
    if num_tokens == 1:
        return fused.reshape(rows, num_heads, 1, -1)
    return fused.reshape(rows, num_tokens, num_heads, -1).transpose(0, 2, 1, 3)
