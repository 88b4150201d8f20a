"""TurboQuant: keys in affine groups, values rotated and rounded to the nearest centroid of a normal distribution."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_kvcache.bits import pack_bits, unpack_bits
from headrace_kvcache.centroids import boundaries, centroids
from headrace_kvcache.errors import InvalidGeometry
from headrace_kvcache.packing import TURBO_HEAD_DIMS, TurboPacking
from headrace_kvcache.tiles import tiled_attention

if TYPE_CHECKING:
    from headrace_kvcache.forms import Fields
    from headrace_kvcache.masks import Mask
    from headrace_kvcache.spec import ElementType

_GROUP = 32
_SIGN_SEED = 42
# float16 holds integers exactly up to here: a zero point beyond it would be wrong, or infinite.
_MAX_ZERO = 2048.0
# The smallest positive float16.
_MIN_SCALE = 2.0**-24

_DTYPES: dict[ElementType, mx.Dtype] = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_NAMES: dict[mx.Dtype, ElementType] = {dtype: name for name, dtype in _DTYPES.items()}


class TurboForm:
    """Keys and values by TurboQuant: 200 bytes a token and head at 128 and k8v3, where float16 takes 512.

    Keys: groups of 32 elements, an index per element, a float16 scale and zero point per group. Values: fixed signs
    and a Walsh-Hadamard rotation, then per group of 32 a float16 scale and per element the nearest Lloyd-Max centroid.
    Attention un-rotates its output instead of the context.

    Args:
        key_bits: 2, 4, 5 or 8.
        value_bits: 2, 3, 4, 5 or 8.

    Raises:
        InvalidScheme: bits outside these.
    """

    __slots__ = ("element_type", "key_bits", "packing", "value_bits")

    def __init__(self, key_bits: int = 8, value_bits: int = 3) -> None:
        self.packing = TurboPacking(key_bits=key_bits, value_bits=value_bits)
        self.key_bits = key_bits
        self.value_bits = value_bits
        # Its name, because a dtype cannot be copied and caches can.
        self.element_type: ElementType | None = None

    @property
    def key(self) -> str:
        """Names everything that changes bytes or numbers."""
        return f"turbo:{self.packing.key}"

    @property
    def num_key_fields(self) -> int:
        """How many of the fields are those of the keys."""
        return 3

    def check(self, keys: mx.array, values: mx.array) -> None:
        """Raise `InvalidGeometry` unless the head sizes are rotated and the dtype is that of what is stored."""
        for name, array in (("key", keys), ("value", values)):
            if array.shape[-1] not in TURBO_HEAD_DIMS:
                raise InvalidGeometry(
                    f"the {name} head size is {array.shape[-1]}; TurboQuant needs one of "
                    f"{', '.join(map(str, TURBO_HEAD_DIMS))}"
                )
            if array.dtype not in _NAMES or self.element_type not in {None, _NAMES[array.dtype]}:
                raise InvalidGeometry(f"{name}s are in {array.dtype}; this cache holds {self.element_type or 'floats'}")

    def encode(self, keys: mx.array, values: mx.array) -> Fields:
        """Return index words, scales and zero points of the keys, then index words and scales of the values."""
        self.element_type = _NAMES[keys.dtype]
        return *encode_keys(keys, self.key_bits), *encode_values(values, self.value_bits)

    def decode(self, fields: Fields) -> tuple[mx.array, mx.array]:
        """Return what is stored, in the dtype that it came in."""
        dtype = _DTYPES[self.element_type or "float32"]
        values = rotate_back(self._values(fields[3:]))
        return self._keys(fields[:3]).astype(dtype), values.astype(dtype)

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
        """Attend tile by tile in the rotated domain, and rotate the outputs back."""
        tiles = _TurboTiles(self, fields)
        rotated = tiled_attention(
            queries.astype(mx.float32), tiles, scale=scale, mask=mask, sinks=sinks, softcap=softcap
        )
        return rotate_back(rotated).astype(queries.dtype)

    def _keys(self, fields: Fields) -> mx.array:
        return decode_keys(fields, self.key_bits)

    def _values(self, fields: Fields) -> mx.array:
        return decode_rotated_values(fields, self.value_bits)


class _TurboTiles:
    """One tile unpacked at a time, the values rotated."""

    __slots__ = ("_fields", "_form", "dtype", "num_columns", "num_kv_heads")

    def __init__(self, form: TurboForm, fields: Fields) -> None:
        self._form = form
        self._fields = fields
        self.dtype = mx.float32
        self.num_kv_heads, self.num_columns = fields[0].shape[1], fields[0].shape[2]

    def scores(self, queries: mx.array, tile: range) -> mx.array:
        keys = decode_keys(self._part(tile)[:3], self._form.key_bits)
        return queries @ keys.swapaxes(-1, -2)

    def outputs(self, weights: mx.array, tile: range) -> mx.array:
        return weights @ decode_rotated_values(self._part(tile)[3:], self._form.value_bits)

    def _part(self, tile: range) -> Fields:
        return tuple(field[..., tile.start : tile.stop, :] for field in self._fields)


def encode_keys(keys: mx.array, bits: int) -> Fields:
    """Return index words `(..., D * bits / 32)`, scales and zero points `(..., D / 32)` of keys `(..., D)`."""
    groups = _groups(keys.astype(mx.float32))
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    num_steps = 254 if bits == 8 else (1 << bits) - 1
    # A group that hardly varies has a zero point beyond float16, unless the steps are held that wide.
    least = mx.maximum(mx.maximum(mx.abs(low), mx.abs(high)) / (_MAX_ZERO - num_steps), _MIN_SCALE)
    scales = _rounded_up(mx.maximum((high - low) / num_steps, least))
    steps = scales.astype(mx.float32)
    zeros = mx.round((low + high) / (2 * steps)) - 127 if bits == 8 else mx.round(low / steps)
    indices = mx.clip(mx.round(groups / steps) - zeros, 0, num_steps)
    packed = pack_bits(indices.astype(mx.uint32).reshape(keys.shape), bits)
    return packed, scales.squeeze(-1), zeros.astype(mx.float16).squeeze(-1)


def decode_keys(fields: Fields, bits: int) -> mx.array:
    """Return keys `(..., D)` in float32: (index + zero point) * scale."""
    packed, scales, zeros = fields
    indices = _groups(unpack_bits(packed, bits).astype(mx.float32))
    keys = (indices + zeros.astype(mx.float32)[..., None]) * scales.astype(mx.float32)[..., None]
    return keys.reshape(*packed.shape[:-1], -1)


def encode_values(values: mx.array, bits: int) -> Fields:
    """Return index words `(..., D * bits / 32)` and scales `(..., D / 32)` of values `(..., D)`."""
    groups = _groups(rotate(values.astype(mx.float32)))
    scales = mx.sqrt(mx.mean(groups * groups, axis=-1, keepdims=True)).astype(mx.float16)
    normal = groups / mx.maximum(scales.astype(mx.float32), _MIN_SCALE)
    return pack_bits(_nearest(normal, bits).reshape(values.shape), bits), scales.squeeze(-1)


def decode_rotated_values(fields: Fields, bits: int) -> mx.array:
    """Return values `(..., D)` in float32, still rotated."""
    packed, scales = fields
    found = _groups(mx.array(centroids(bits))[unpack_bits(packed, bits)])
    return (found * scales.astype(mx.float32)[..., None]).reshape(*packed.shape[:-1], -1)


def rotate(values: mx.array) -> mx.array:
    """Spread each value vector evenly over its elements: fixed signs, then a Walsh-Hadamard transform."""
    return mx.hadamard_transform(values * _signs(values.shape[-1]))


def rotate_back(rotated: mx.array) -> mx.array:
    """Undo `rotate`: the transform is its own inverse."""
    return mx.hadamard_transform(rotated) * _signs(rotated.shape[-1])


def _signs(size: int) -> mx.array:
    bits = random.Random(_SIGN_SEED).getrandbits(size)  # noqa: S311
    return mx.array([1.0 if bits >> place & 1 else -1.0 for place in range(size)])


def _rounded_up(scales: mx.array) -> mx.array:
    """Return float16 scales of at least the given ones: rounded down, tiny ones would clip much of their group."""
    nearest = scales.astype(mx.float16)
    above = (scales + mx.maximum(scales * 2.0**-10, _MIN_SCALE)).astype(mx.float16)
    return mx.where(nearest.astype(mx.float32) < scales, above, nearest)


def _groups(array: mx.array) -> mx.array:
    return array.reshape(*array.shape[:-1], -1, _GROUP)


def _nearest(normal: mx.array, bits: int) -> mx.array:
    """Return the index of the nearest centroid, by bisection of the boundaries."""
    edges = mx.array(boundaries(bits))
    found = mx.zeros(normal.shape, mx.uint32)
    for place in reversed(range(bits)):
        middle = found + (1 << place)
        found = mx.where(normal > edges[middle - 1], middle, found)
    return found
