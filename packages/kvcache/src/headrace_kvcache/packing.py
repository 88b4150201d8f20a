"""How many bytes a head takes in each stored form. Free of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from headrace_kvcache.errors import InvalidScheme

if TYPE_CHECKING:
    from headrace_kvcache.spec import LayerSpec

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)
TURBO_KEY_BITS = (2, 4, 5, 8)
TURBO_VALUE_BITS = (2, 3, 4, 5, 8)
TURBO_HEAD_DIMS = (64, 128, 256, 512)

_TURBO_GROUP = 32
_HALF_BYTES = 2


def _one_of(*allowed: int) -> object:
    def check(_instance: object, attribute: object, value: object) -> None:
        if type(value) is not int or value not in allowed:
            name = getattr(attribute, "name", "value")
            raise InvalidScheme(f"{name} is {value!r}; it must be one of {', '.join(map(str, allowed))}")

    return check


@frozen(kw_only=True)
class AffinePacking:
    """MLX's affine triples: packed bits, and one scale and one bias per group of a head.

    Attributes:
        bits: bits per element: 2, 3, 4, 5, 6 or 8.
        group_size: elements of a head that share a scale and a bias: 32, 64 or 128.

    Raises:
        InvalidScheme: a value outside these.
    """

    bits: int = field(validator=_one_of(*AFFINE_BITS))  # pyright: ignore[reportArgumentType, reportCallIssue]
    group_size: int = field(validator=_one_of(*AFFINE_GROUP_SIZES))  # pyright: ignore[reportArgumentType, reportCallIssue]

    @property
    def key(self) -> str:
        """Bits and group size."""
        return f"b{self.bits}-g{self.group_size}"

    def bytes_per_token(self, layer: LayerSpec, item_size: int) -> int:
        """Return bits / 8 + 2 * item size / group size per element."""
        elements = layer.elements_per_token
        return elements * self.bits // 8 + 2 * item_size * (elements // self.group_size)

    def misfit(self, layer: LayerSpec) -> str | None:
        """Return why a layer can never be stored like this, or None."""
        if layer.kind not in {"full", "sliding", "latent"}:
            return f"a {layer.kind} layer cannot be quantized"
        for name, size in (("key", layer.key_head_dim), ("value", layer.value_head_dim)):
            if size % self.group_size:
                return f"its {name} head size {size} is no multiple of the group size {self.group_size}"
        return None


@frozen(kw_only=True)
class TurboPacking:
    """TurboQuant: keys in affine groups of 32, values rotated and rounded to Lloyd-Max centroids.

    Attributes:
        key_bits: 2, 4, 5 or 8.
        value_bits: 2, 3, 4, 5 or 8.

    Raises:
        InvalidScheme: a value outside these.
    """

    key_bits: int = field(validator=_one_of(*TURBO_KEY_BITS))  # pyright: ignore[reportArgumentType, reportCallIssue]
    value_bits: int = field(validator=_one_of(*TURBO_VALUE_BITS))  # pyright: ignore[reportArgumentType, reportCallIssue]

    @property
    def key(self) -> str:
        """Key and value bits."""
        return f"k{self.key_bits}v{self.value_bits}"

    def bytes_per_token(self, layer: LayerSpec, item_size: int) -> int:
        """Return packed bits, a float16 scale and zero point per key group and a float16 scale per value group."""
        del item_size
        keys = layer.key_head_dim * self.key_bits // 8 + 2 * _HALF_BYTES * (layer.key_head_dim // _TURBO_GROUP)
        values = layer.value_head_dim * self.value_bits // 8 + _HALF_BYTES * (layer.value_head_dim // _TURBO_GROUP)
        return layer.num_kv_heads * (keys + values)

    def misfit(self, layer: LayerSpec) -> str | None:
        """Return why a layer can never be stored like this, or None."""
        if layer.kind != "full":
            return f"a {layer.kind} layer cannot be stored by TurboQuant"
        for name, size in (("key", layer.key_head_dim), ("value", layer.value_head_dim)):
            if size not in TURBO_HEAD_DIMS:
                return f"its {name} head size {size} is none of {', '.join(map(str, TURBO_HEAD_DIMS))}"
        return None
