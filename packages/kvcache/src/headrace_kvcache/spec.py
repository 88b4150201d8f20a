"""What a model's caches look like, and their exact bytes. Free of arrays."""

from collections.abc import Iterable
from typing import Literal, Protocol

from attrs import field, frozen

from headrace_kvcache.errors import InvalidGeometry, InvalidLength

ElementType = Literal["float32", "bfloat16", "float16"]
LayerKind = Literal["full", "sliding", "chunked", "latent", "recurrent", "shared", "list"]

ITEM_SIZES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

_SLAB = 256
_SIZES = ("num_kv_heads", "key_head_dim", "value_head_dim", "window")
_HEADS = frozenset({"num_kv_heads", "key_head_dim", "value_head_dim"})
_NEEDED: dict[str, frozenset[str]] = {
    "full": _HEADS,
    "sliding": _HEADS | {"window"},
    "chunked": _HEADS | {"window"},
    "latent": _HEADS,
    "recurrent": frozenset(),
    "shared": frozenset(),
    "list": frozenset(),
}


class Packing(Protocol):
    """A stored form by its sizes alone."""

    @property
    def key(self) -> str:
        """Names everything that changes bytes or numbers, besides the element type."""
        ...

    def bytes_per_token(self, layer: "LayerSpec", item_size: int) -> int:
        """Return what one position of an attention layer costs."""
        ...

    def misfit(self, layer: "LayerSpec") -> str | None:
        """Return why a layer can never be stored like this, or None."""
        ...


def _element_type(_instance: object, _attribute: object, value: object) -> None:
    if value not in ITEM_SIZES:
        raise InvalidGeometry(f"dtype is {value!r}; it must be one of {', '.join(ITEM_SIZES)}")


@frozen(kw_only=True)
class LayerSpec:
    """What one layer's cache holds.

    The sizes a kind needs must be positive, the others stay 0. Plain attention is the default; the class methods
    make the other kinds.

    Attributes:
        num_kv_heads: key and value heads.
        key_head_dim: size of a key head.
        value_head_dim: size of a value head.
        kind: `full`, `sliding`, `chunked`, `latent`, `recurrent`, `shared` (attends to another layer's cache and
            owns none) or `list` (several caches).
        window: positions that a sliding layer sees, or positions of a chunk.
        tail_elements: elements of a recurrent layer in the caches' element type: the tail of a convolution.
        state_elements: float32 elements of a recurrent layer.
        members: what a list holds.

    Raises:
        InvalidGeometry: a size that the kind needs is not an integer of at least 1, or an unknown kind.
    """

    num_kv_heads: int = 0
    key_head_dim: int = 0
    value_head_dim: int = 0
    kind: LayerKind = "full"
    window: int = 0
    tail_elements: int = 0
    state_elements: int = 0
    members: tuple["LayerSpec", ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.kind not in _NEEDED:
            raise InvalidGeometry(f"kind is {self.kind!r}; it must be one of {', '.join(_NEEDED)}")
        for name in _SIZES:
            value, needed = getattr(self, name), name in _NEEDED[self.kind]
            if type(value) is not int or (value < 1 if needed else value != 0):
                raise InvalidGeometry(
                    f"{name} is {value!r}; a {self.kind} layer needs {'an integer of at least 1' if needed else '0'}"
                )
        for name in ("tail_elements", "state_elements"):
            value = getattr(self, name)
            if type(value) is not int or value < 0 or (value and self.kind != "recurrent"):
                raise InvalidGeometry(
                    f"{name} is {value!r}; it must be an integer of at least 0, or 0 if not recurrent"
                )
        if (self.kind == "list") != bool(self.members):
            raise InvalidGeometry(f"members are {self.members!r}; a list has at least one, another kind has none")

    @classmethod
    def full(cls, *, num_kv_heads: int, key_head_dim: int, value_head_dim: int) -> "LayerSpec":
        """Describe attention to every position before: a `KVCache`."""
        return cls(num_kv_heads=num_kv_heads, key_head_dim=key_head_dim, value_head_dim=value_head_dim)

    @classmethod
    def sliding(cls, *, window: int, num_kv_heads: int, key_head_dim: int, value_head_dim: int) -> "LayerSpec":
        """Describe attention to the last `window` positions, kept ones included: a `RotatingKVCache`."""
        return cls(
            kind="sliding",
            window=window,
            num_kv_heads=num_kv_heads,
            key_head_dim=key_head_dim,
            value_head_dim=value_head_dim,
        )

    @classmethod
    def chunked(cls, *, chunk_size: int, num_kv_heads: int, key_head_dim: int, value_head_dim: int) -> "LayerSpec":
        """Describe attention within chunks: a `ChunkedKVCache`."""
        return cls(
            kind="chunked",
            window=chunk_size,
            num_kv_heads=num_kv_heads,
            key_head_dim=key_head_dim,
            value_head_dim=value_head_dim,
        )

    @classmethod
    def latent(cls, *, latent_dim: int, rope_dim: int) -> "LayerSpec":
        """Describe latent attention: one head whose key is the latent and whose value the positioned part."""
        return cls(kind="latent", num_kv_heads=1, key_head_dim=latent_dim, value_head_dim=rope_dim)

    @classmethod
    def recurrent(cls, *, tail_elements: int = 0, state_elements: int = 0) -> "LayerSpec":
        """Describe a recurrent layer: a `RecurrentCache`."""
        return cls(kind="recurrent", tail_elements=tail_elements, state_elements=state_elements)

    @classmethod
    def shared(cls) -> "LayerSpec":
        """Describe a layer that attends to another layer's cache."""
        return cls(kind="shared")

    @classmethod
    def list_of(cls, *members: "LayerSpec") -> "LayerSpec":
        """Describe a layer that owns several caches: a `CacheList`."""
        return cls(kind="list", members=members)

    @property
    def elements_per_token(self) -> int:
        """Elements that one held position costs."""
        return self.num_kv_heads * (self.key_head_dim + self.value_head_dim)

    def columns_at(self, num_tokens: int) -> int:
        """Return how many positions the buffers of a lone row have room for, at rest."""
        whole = -(-num_tokens // _SLAB) * _SLAB
        if self.kind == "sliding":
            return min(whole, self.window)
        if self.kind == "chunked":
            return whole - max(0, num_tokens - self.window) // _SLAB * _SLAB
        return whole

    def bytes_at(self, num_tokens: int, *, dtype: ElementType, packing: Packing | None = None) -> int:
        """Return the exact bytes of a lone row's cache that holds `num_tokens` positions, at rest."""
        if not num_tokens:
            return 0
        if self.kind == "list":
            return sum(member.bytes_at(num_tokens, dtype=dtype) for member in self.members)
        item_size = ITEM_SIZES[dtype]
        if self.kind == "recurrent":
            return self.tail_elements * item_size + self.state_elements * ITEM_SIZES["float32"]
        per_token = self.elements_per_token * item_size
        if packing is not None:
            per_token = packing.bytes_per_token(self, item_size)
        return self.columns_at(num_tokens) * per_token


def _layers(value: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    layers = tuple(value)
    if not layers:
        raise InvalidGeometry("layers is empty; a model has at least one cache-owning layer")
    return layers


@frozen(kw_only=True)
class CacheSpec:
    """The caches of a model, in the order of its layers.

    Attributes:
        layers: one entry per layer.
        dtype: element type of the caches.

    Raises:
        InvalidGeometry: no layer, or an unknown element type.
    """

    layers: tuple[LayerSpec, ...] = field(converter=_layers)
    dtype: ElementType = field(validator=_element_type)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more position costs over all layers that grow without end."""
        elements = sum(layer.elements_per_token for layer in self.layers if layer.kind in {"full", "latent"})
        return elements * ITEM_SIZES[self.dtype]


def kv_bytes_at(spec: CacheSpec, num_tokens: int) -> int:
    """Return the exact bytes of one row's unquantized caches that hold `num_tokens` positions, at rest.

    Layers that grow take whole slabs of 256 positions, sliding ones at most their window, chunked ones the slabs
    that cover what they hold, recurrent ones a constant, shared ones nothing.

    Raises:
        InvalidLength: a negative number, or not an integer.
    """
    check_num_tokens("num_tokens", num_tokens)
    return sum(layer.bytes_at(num_tokens, dtype=spec.dtype) for layer in spec.layers)


def slot_kv_bytes_at(spec: CacheSpec, num_tokens: int, *, num_slots: int = 1) -> int:
    """Return the exact bytes of a `RowBatch` whose longest row holds `num_tokens` positions, in powers of two from 256.

    Args:
        spec: the caches.
        num_tokens: positions of the longest row.
        num_slots: slots allocated; the batch doubles them up to its `max_rows`.

    Raises:
        InvalidLength: a negative number, or not an integer.
    """
    check_num_tokens("num_tokens", num_tokens)
    check_num_tokens("num_slots", num_slots)
    capacity = max(_SLAB, 1 << (num_tokens - 1).bit_length()) if num_tokens else 0
    return spec.bytes_per_token * capacity * num_slots


def check_num_tokens(name: str, value: int) -> None:
    """Raise `InvalidLength` unless the number is an integer of at least 0."""
    if type(value) is not int or value < 0:
        raise InvalidLength(f"{name} is {value!r}; it must be an integer of at least 0")
