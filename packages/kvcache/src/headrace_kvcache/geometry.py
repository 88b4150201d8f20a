"""Checks of the arrays that reach a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_kvcache.errors import InvalidGeometry

if TYPE_CHECKING:
    import mlx.core as mx


def check_appended(queries: mx.array, keys: mx.array, values: mx.array) -> None:
    """Raise `InvalidGeometry` unless the three arrays belong to one append."""
    batch, num_heads, num_tokens, head_dim = queries.shape
    key_shape, value_shape = keys.shape, values.shape
    num_kv_heads = key_shape[1]
    if (
        key_shape != (batch, num_kv_heads, num_tokens, head_dim)
        or value_shape[:3] != key_shape[:3]
        or num_heads % num_kv_heads
    ):
        raise InvalidGeometry(
            f"queries {queries.shape}, keys {key_shape} and values {value_shape} do not fit: they must be "
            f"(B, Hq, T, D), (B, Hk, T, D) and (B, Hk, T, Dv) with Hq a multiple of Hk"
        )


def check_fits(buffer: mx.array, added: mx.array, name: str) -> None:
    """Raise `InvalidGeometry` unless `added` has the heads, head size and dtype of the cache's buffer."""
    if buffer.shape[1] != added.shape[1] or buffer.shape[3] != added.shape[3] or buffer.dtype != added.dtype:
        raise InvalidGeometry(
            f"{name} of shape {added.shape} {added.dtype} do not fit a cache of {buffer.shape[1]} heads of size "
            f"{buffer.shape[3]} in {buffer.dtype}; one cache holds one layer of one model"
        )
