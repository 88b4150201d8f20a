"""What a model's caches look like, and their exact bytes. Free of arrays."""

from collections.abc import Iterable
from typing import Literal

from attrs import field, frozen

from headrace_kvcache.errors import InvalidGeometry, InvalidLength

ElementType = Literal["float32", "bfloat16", "float16"]

_ITEM_SIZES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_SLAB = 256


def _positive(_instance: object, attribute: object, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InvalidGeometry(
            f"{getattr(attribute, 'name', 'value')} is {value!r}; it must be an integer of at least 1"
        )


def _element_type(_instance: object, _attribute: object, value: object) -> None:
    if value not in _ITEM_SIZES:
        raise InvalidGeometry(f"dtype is {value!r}; it must be one of {', '.join(_ITEM_SIZES)}")


@frozen(kw_only=True)
class LayerSpec:
    """One cache-owning layer of plain attention.

    Attributes:
        num_kv_heads: key and value heads.
        key_head_dim: size of a key head.
        value_head_dim: size of a value head.

    Raises:
        InvalidGeometry: a size that is not an integer of at least 1.
    """

    num_kv_heads: int = field(validator=_positive)
    key_head_dim: int = field(validator=_positive)
    value_head_dim: int = field(validator=_positive)

    @property
    def elements_per_token(self) -> int:
        """Elements that one position costs."""
        return self.num_kv_heads * (self.key_head_dim + self.value_head_dim)


def _layers(value: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    layers = tuple(value)
    if not layers:
        raise InvalidGeometry("layers is empty; a model has at least one cache-owning layer")
    return layers


@frozen(kw_only=True)
class CacheSpec:
    """All cache-owning layers of a model; layers that share another one's cache are not listed.

    Attributes:
        layers: one entry per cache.
        dtype: element type of the caches.

    Raises:
        InvalidGeometry: no layer, or an unknown element type.
    """

    layers: tuple[LayerSpec, ...] = field(converter=_layers)
    dtype: ElementType = field(validator=_element_type)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one position costs over all layers."""
        return sum(layer.elements_per_token for layer in self.layers) * _ITEM_SIZES[self.dtype]


def kv_bytes_at(spec: CacheSpec, num_tokens: int) -> int:
    """Return the exact bytes of one row's `KVCache`s that hold `num_tokens` positions, in whole slabs of 256.

    Raises:
        InvalidLength: a negative number, or not an integer.
    """
    _check_tokens("num_tokens", num_tokens)
    return spec.bytes_per_token * (-(-num_tokens // _SLAB) * _SLAB)


def slot_kv_bytes_at(spec: CacheSpec, num_tokens: int, *, num_slots: int = 1) -> int:
    """Return the exact bytes of a `RowBatch` whose longest row holds `num_tokens` positions, in powers of two from 256.

    Args:
        spec: the caches.
        num_tokens: positions of the longest row.
        num_slots: slots allocated; the batch doubles them up to its `max_rows`.

    Raises:
        InvalidLength: a negative number, or not an integer.
    """
    _check_tokens("num_tokens", num_tokens)
    _check_tokens("num_slots", num_slots)
    capacity = max(_SLAB, 1 << (num_tokens - 1).bit_length()) if num_tokens else 0
    return spec.bytes_per_token * capacity * num_slots


def _check_tokens(name: str, value: int) -> None:
    if type(value) is not int or value < 0:
        raise InvalidLength(f"{name} is {value!r}; it must be an integer of at least 0")
