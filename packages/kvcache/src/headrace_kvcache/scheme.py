"""KV schemes: in which form the caches of a model are stored. Free of arrays until caches are converted."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import evolve, field, frozen

from headrace_kvcache.errors import InvalidScheme
from headrace_kvcache.packing import AFFINE_BITS, AffinePacking, TurboPacking
from headrace_kvcache.spec import CacheSpec, ElementType, LayerKind, Packing, check_num_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableSequence, Sequence

SchemeKind = Literal["unquantized", "uniform", "per-layer", "turbo"]

FIRST_CHUNK = 2048
DEFAULT_GROUP_SIZE = 64

_TURBO = re.compile(r"turbo:k(\d+)v(\d+)")


def first_chunk_length(num_prompt_tokens: int, *, boundary: int | None = None) -> int:
    """Return how many positions of a row are stored unquantized before its caches are converted.

    It follows from the prompt alone, whatever slices a scheduler prefills in, so that equal prompts give equal bytes.

    Args:
        num_prompt_tokens: length of the prompt.
        boundary: positions of the snapshot that is taken of the prompt, if one is.

    Raises:
        InvalidLength: a negative number, or not an integer.
    """
    check_num_tokens("num_prompt_tokens", num_prompt_tokens)
    length = min(num_prompt_tokens, FIRST_CHUNK)
    if boundary is None:
        return length
    check_num_tokens("boundary", boundary)
    return min(length, boundary) if boundary else length


@frozen(kw_only=True)
class LayerPacking:
    """What one layer is stored in.

    Attributes:
        layer: index of the layer.
        packing: bits and group size.
    """

    layer: int
    packing: AffinePacking


def _entries(entries: Iterable[LayerPacking]) -> tuple[LayerPacking, ...]:
    ordered = tuple(sorted(entries, key=lambda entry: entry.layer))
    layers = [entry.layer for entry in ordered]
    for layer in layers:
        if layers.count(layer) > 1:
            raise InvalidScheme(f"layer {layer} has more than one entry; give each layer one", layer)
    return ordered


@frozen(kw_only=True)
class KVScheme:
    """An immutable choice of how a model's keys and values are stored; one per loaded model.

    Make one by `unquantized`, `uniform`, `per_layer`, `turbo`, `from_kv_config` or `parse`.

    Attributes:
        kind: `unquantized`, `uniform`, `per-layer` or `turbo`.
        packing: form of every layer that can take it; None for unquantized and per-layer schemes.
        entries: forms of single layers, ascending.
        start: positions that a row holds before it is converted.
        dtype: element type of the caches; `for_dtype` sets it once the model is known.
    """

    kind: SchemeKind
    packing: Packing | None = None
    entries: tuple[LayerPacking, ...] = field(default=(), converter=_entries)
    start: int = 0
    dtype: ElementType | None = None

    @classmethod
    def unquantized(cls) -> KVScheme:
        """Keep keys and values as they come."""
        return cls(kind="unquantized")

    @classmethod
    def uniform(cls, bits: int, group_size: int = DEFAULT_GROUP_SIZE, start: int = 0) -> KVScheme:
        """Quantize every layer of keys and values in the same way.

        Args:
            bits: bits per element: 2, 3, 4, 5, 6 or 8.
            group_size: elements of a head that share a scale and a bias: 32, 64 or 128.
            start: positions that a row holds before it is converted; above 0 the scheme is not batchable.

        Raises:
            InvalidScheme: bits or a group size outside these.
            InvalidLength: `start` is negative or not an integer.
        """
        check_num_tokens("start", start)
        return cls(kind="uniform", packing=AffinePacking(bits=bits, group_size=group_size), start=start)

    @classmethod
    def per_layer(cls, entries: Iterable[tuple[int, int, int]]) -> KVScheme:
        """Quantize the layers named, each in its own way; the others stay unquantized.

        Args:
            entries: (layer index, bits, group size) of each layer.

        Raises:
            InvalidScheme: no entry, a layer named twice, or a value outside its range, with the layer's index.
        """
        found = [_layer_packing(*entry) for entry in entries]
        if not found:
            raise InvalidScheme("a per-layer scheme has no entries; name at least one layer, or use unquantized")
        return cls(kind="per-layer", entries=tuple(found))

    @classmethod
    def turbo(cls, key_bits: int = 8, value_bits: int = 3) -> KVScheme:
        """Store full-attention layers by TurboQuant; sliding and other layers stay unquantized.

        Args:
            key_bits: 2, 4, 5 or 8.
            value_bits: 2, 3, 4, 5 or 8.

        Raises:
            InvalidScheme: bits outside these.
        """
        return cls(kind="turbo", packing=TurboPacking(key_bits=key_bits, value_bits=value_bits))

    @classmethod
    def from_kv_config(cls, path: str | Path) -> KVScheme:
        """Read a `kv_config.json`: a list of `{"layer_idx", "bits", "group_size"}`.

        Args:
            path: the file, or the model folder that holds it.

        Raises:
            InvalidScheme: the file cannot be read, is no such list, or holds a value outside its range.
        """
        return cls.per_layer(_read_entries(path))

    @classmethod
    def parse(cls, text: str, *, kv_config: str | Path | None = None) -> KVScheme:
        """Read the scheme that a command line names; it starts at position 0.

        Args:
            text: `off`, bits such as `4` or `8` (groups of 64), `config`, or `turbo:k8v3`.
            kv_config: file or model folder that `config` reads.

        Raises:
            InvalidScheme: another text, or `config` without a file.
        """
        if text == "off":
            return cls.unquantized()
        if text in {str(bits) for bits in AFFINE_BITS}:
            return cls.uniform(int(text))
        turbo = _TURBO.fullmatch(text)
        if turbo:
            return cls.turbo(int(turbo[1]), int(turbo[2]))
        if text != "config":
            raise InvalidScheme(
                f"the KV scheme is {text!r}; it must be off, {', '.join(map(str, AFFINE_BITS))}, config or turbo:k8v3"
            )
        if kv_config is None:
            raise InvalidScheme("the KV scheme is 'config', but the model has no kv_config.json; name one or use off")
        return cls.from_kv_config(kv_config)

    def for_dtype(self, dtype: ElementType) -> KVScheme:
        """Return the scheme for caches of an element type, which `key` names."""
        return evolve(self, dtype=dtype)

    @property
    def key(self) -> str:
        """Names everything that changes bytes or numbers, for namespaces of stored caches.

        Raises:
            InvalidScheme: the element type is not known yet.
        """
        if self.dtype is None:
            raise InvalidScheme("the scheme does not know its element type; call for_dtype() first")
        if self.kind == "per-layer":
            listed = [[entry.layer, entry.packing.bits, entry.packing.group_size] for entry in self.entries]
            return f"per-layer-{self.dtype}-{hashlib.sha256(json.dumps(listed).encode()).hexdigest()}"
        parts = [self.kind, self.dtype]
        if self.packing is not None:
            parts.append(self.packing.key)
        return "-".join([*parts, f"s{self.start}"] if self.kind == "uniform" else parts)

    def packing_of(self, index: int, kind: LayerKind) -> Packing | None:
        """Return the form of a layer's keys and values; None if it stays unquantized.

        A uniform or turbo scheme passes over layers that it does not concern: recurrent, chunked, shared and lists,
        and for turbo sliding and latent ones. A per-layer scheme concerns exactly the layers that it names.
        """
        if self.kind == "per-layer":
            return next((entry.packing for entry in self.entries if entry.layer == index), None)
        concerned = {"full"} if self.kind == "turbo" else {"full", "sliding", "latent"}
        return self.packing if kind in concerned else None

    def passed_over(self, spec: CacheSpec) -> tuple[int, ...]:
        """Return the layers with keys and values that stay unquantized, for a caller that wants to say so once."""
        if self.kind == "unquantized":
            return ()
        return tuple(
            index
            for index, layer in enumerate(spec.layers)
            if layer.kind not in {"recurrent", "shared"} and self.packing_of(index, layer.kind) is None
        )

    def check(self, spec: CacheSpec) -> None:
        """Check at start-up that every layer concerned can be stored like this.

        Raises:
            InvalidScheme: with the index of the first layer that can never be converted.
        """
        for entry in self.entries:
            if not 0 <= entry.layer < len(spec.layers):
                raise InvalidScheme(
                    f"layer {entry.layer} is named, but the model has layers 0 to {len(spec.layers) - 1}", entry.layer
                )
        for index, layer in enumerate(spec.layers):
            packing = self.packing_of(index, layer.kind)
            reason = None if packing is None else packing.misfit(layer)
            if reason is not None:
                raise InvalidScheme(
                    f"layer {index} can never be stored as {self.kind}: {reason}; choose another scheme", index
                )

    def batchable(self, spec: CacheSpec, can_convert: Callable[[int], bool]) -> bool:
        """Return whether rows of one batch can all be stored like this.

        Args:
            spec: the model's caches.
            can_convert: tells of a layer's index whether its fresh cache can be converted in a batch.
        """
        try:
            self.check(spec)
        except InvalidScheme:
            return False
        concerned = [index for index, layer in enumerate(spec.layers) if self.packing_of(index, layer.kind) is not None]
        return self.start == 0 and all(can_convert(index) for index in concerned)

    def bytes_at(self, spec: CacheSpec, num_tokens: int) -> int:
        """Return the exact bytes of one row's caches that hold `num_tokens` positions, at rest and converted.

        Raises:
            InvalidLength: a negative number, or not an integer.
        """
        check_num_tokens("num_tokens", num_tokens)
        is_converted = num_tokens >= self.start
        return sum(
            layer.bytes_at(
                num_tokens, dtype=spec.dtype, packing=self.packing_of(index, layer.kind) if is_converted else None
            )
            for index, layer in enumerate(spec.layers)
        )

    def convert(self, caches: MutableSequence[object]) -> int:
        """Convert one row's caches in place, a layer at a time, and return how many were converted.

        Skipped are caches that the scheme does not concern, empty ones, and those that hold less than `start`
        positions. Call it at the end of the first chunk, see `first_chunk_length`.

        Args:
            caches: the caches by layer.

        Raises:
            InvalidScheme: a layer does not fit, with its index; nothing was converted.
        """
        from headrace_kvcache.conversion import convert_layers

        return convert_layers(caches, self.packing_of, start=self.start)


def _layer_packing(layer: int, bits: int, group_size: int) -> LayerPacking:
    if type(layer) is not int or layer < 0:
        raise InvalidScheme(f"the layer index is {layer!r}; it must be an integer of at least 0")
    try:
        return LayerPacking(layer=layer, packing=AffinePacking(bits=bits, group_size=group_size))
    except InvalidScheme as error:
        raise InvalidScheme(f"layer {layer}: {error}", layer) from None


def _read_entries(path: str | Path) -> Sequence[tuple[int, int, int]]:
    file = Path(path)
    if file.is_dir():
        file = file / "kv_config.json"
    try:
        loaded: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidScheme(f"{str(file)!r} cannot be read as a KV configuration: {error}") from error
    if not isinstance(loaded, list):
        raise InvalidScheme(f"{str(file)!r} holds {type(loaded).__name__}; it must hold a list of layers")
    return [_entry(file, position, each) for position, each in enumerate(loaded)]


def _entry(file: Path, position: int, entry: object) -> tuple[int, int, int]:
    wanted = ("layer_idx", "bits", "group_size")
    if not isinstance(entry, Mapping) or set(entry) != set(wanted):
        raise InvalidScheme(f"{str(file)!r}, entry {position}: {entry!r} must have exactly {', '.join(wanted)}")
    layer, bits, group_size = (entry[name] for name in wanted)
    return layer, bits, group_size
