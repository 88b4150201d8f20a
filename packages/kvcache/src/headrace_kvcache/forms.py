"""How a batch stores keys and values: as they are, or as affine triples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from headrace_kvcache.affine import check_format, check_head_dim, dequantize, quantize, quantized_attention
from headrace_kvcache.attention import masked_attention

if TYPE_CHECKING:
    import mlx.core as mx

    from headrace_kvcache.attention import Mask

# Arrays of one layer that share rows, heads and tokens, `(B, H, T, ...)` each: first those of the keys.
Fields: TypeAlias = "tuple[mx.array, ...]"


class StoredForm(Protocol):
    """What lies in the buffers of a layer. Every token slice of the fields is the fields of that slice."""

    @property
    def key(self) -> str:
        """Names everything that changes bytes or numbers."""
        ...

    @property
    def num_key_fields(self) -> int:
        """How many of the fields are those of the keys."""
        ...

    def check(self, keys: mx.array, values: mx.array) -> None:
        """Raise `InvalidGeometry` unless arrays of these shapes can be stored."""
        ...

    def encode(self, keys: mx.array, values: mx.array) -> Fields:
        """Return the fields of `keys (B, H, T, D)` and `values (B, H, T, Dv)`."""
        ...

    def decode(self, fields: Fields) -> tuple[mx.array, mx.array]:
        """Return the keys `(B, H, T, D)` and values `(B, H, T, Dv)` that fields stand for."""
        ...

    def attention(
        self,
        queries: mx.array,
        fields: Fields,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attend over stored fields, `(B, Hq, T, Dv)`."""
        ...


class PlainForm:
    """Keys and values as they come."""

    __slots__ = ()

    @property
    def key(self) -> str:
        """Names everything that changes bytes or numbers."""
        return "unquantized"

    @property
    def num_key_fields(self) -> int:
        """How many of the fields are those of the keys."""
        return 1

    def check(self, keys: mx.array, values: mx.array) -> None:
        """Accept everything."""

    def encode(self, keys: mx.array, values: mx.array) -> Fields:
        """Return the two arrays themselves."""
        return keys, values

    def decode(self, fields: Fields) -> tuple[mx.array, mx.array]:
        """Return the two arrays themselves."""
        keys, values = fields
        return keys, values

    def attention(
        self,
        queries: mx.array,
        fields: Fields,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attend with MLX's fused kernel unless the scores are soft-capped."""
        return masked_attention(queries, *fields, scale=scale, mask=mask, sinks=sinks, softcap=softcap)


class AffineForm:
    """Keys and values as affine triples, groups along the head dimension.

    Args:
        bits: bits per element.
        group_size: elements per scale and bias.

    Raises:
        InvalidGeometry: bits or a group size that MLX does not pack.
    """

    __slots__ = ("bits", "group_size")

    def __init__(self, bits: int, group_size: int) -> None:
        check_format(bits, group_size)
        self.bits = bits
        self.group_size = group_size

    @property
    def key(self) -> str:
        """Names everything that changes bytes or numbers."""
        return f"affine:{self.bits}:{self.group_size}"

    @property
    def num_key_fields(self) -> int:
        """How many of the fields are those of the keys."""
        return 3

    def check(self, keys: mx.array, values: mx.array) -> None:
        """Raise `InvalidGeometry` unless both head sizes are made of whole groups."""
        check_head_dim(keys.shape[-1], self.group_size)
        check_head_dim(values.shape[-1], self.group_size)

    def encode(self, keys: mx.array, values: mx.array) -> Fields:
        """Return packed, scales and biases of the keys, then of the values."""
        return (
            *quantize(keys, bits=self.bits, group_size=self.group_size),
            *quantize(values, bits=self.bits, group_size=self.group_size),
        )

    def decode(self, fields: Fields) -> tuple[mx.array, mx.array]:
        """Return the dequantized keys and values, in the dtype of their scales."""
        key_packed, key_scales, key_biases, value_packed, value_scales, value_biases = fields
        return (
            dequantize((key_packed, key_scales, key_biases), bits=self.bits, group_size=self.group_size),
            dequantize((value_packed, value_scales, value_biases), bits=self.bits, group_size=self.group_size),
        )

    def attention(
        self,
        queries: mx.array,
        fields: Fields,
        *,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attend over the packed bits, tile by tile."""
        key_packed, key_scales, key_biases, value_packed, value_scales, value_biases = fields
        return quantized_attention(
            queries,
            (key_packed, key_scales, key_biases),
            (value_packed, value_scales, value_biases),
            scale=scale,
            mask=mask,
            bits=self.bits,
            group_size=self.group_size,
            sinks=sinks,
            softcap=softcap,
        )
