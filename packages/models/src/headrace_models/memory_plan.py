"""The memory that a model takes on a device, as functions of rows and context. Pure arithmetic over headers."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_kvcache import CacheSpec, CapacityClasses, KVScheme, LayerSpec, first_chunk_length
from headrace_models.plan import make_plan
from headrace_models.tensors import tensor_shapes
from headrace_models.transient import Transient

if TYPE_CHECKING:
    from typing import Literal

    from headrace_models.config import ModelConfig
    from headrace_models.device import DeviceKind
    from headrace_models.dtypes import DtypeName
    from headrace_models.headers import CheckpointHeaders

    ElementType = Literal["float32", "bfloat16", "float16"]

__all__ = ["MemoryPlan", "WeightPlan", "plan_weights"]

_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32_SHARE = 0.6
_WORDS = 8
_MIN_COLUMNS = 256
_RING_SLACK = 16
# A process with MLX, its BLAS and what malloc keeps (little, see `device.map_large_blocks`), and a tokenizer, per token
# of the vocabulary. While it is built, which is before any row is there, the tokenizer takes more.
_PROCESS_BYTES = 130_000_000
_TOKEN_BYTES, _LOADING_TOKEN_BYTES = 700, 1_400
# While a row is prefilled in steps of half of their tokens, the next one gets the other half.
_CONVERTING_ROWS = 2


@frozen(kw_only=True)
class WeightPlan:
    """What weights become on a device.

    Attributes:
        size_bytes: of all weights in memory.
        dtype: of what is not packed, of activations and caches.
        is_packed: whether quantized matrices stay so.
    """

    size_bytes: int
    dtype: ElementType
    is_packed: bool


def plan_weights(
    config: ModelConfig, headers: CheckpointHeaders, *, dtype: DtypeName, device: DeviceKind, memory_bytes: int
) -> WeightPlan:
    """Say what `load(dtype=dtype)` will hold, byte for byte, from names and shapes alone.

    Args:
        memory_bytes: the machine's memory, which decides whether `auto` widens to float32.

    Raises:
        UnsupportedArchitecture: no family runs the model.
    """
    shapes = tensor_shapes(config)
    if dtype == "auto":
        is_wide = device == "cpu" and _num_weights(headers) * 4 <= _FLOAT32_SHARE * memory_bytes
        dtype = "float32" if is_wide else "checkpoint"
    if dtype in _ITEM_SIZES:
        name: ElementType = dtype  # pyright: ignore[reportAssignmentType]
        size = sum(prod(shape) for shape in shapes.values()) * _ITEM_SIZES[name]
        return WeightPlan(size_bytes=size + _repeated_gains(config, name), dtype=name, is_packed=False)
    own: ElementType = "float32" if headers.is_packed and device == "cpu" else headers.dtype  # pyright: ignore[reportAssignmentType]
    size = _kept_bytes(shapes, headers, _ITEM_SIZES[own]) + _repeated_gains(config, own)
    return WeightPlan(size_bytes=size, dtype=own, is_packed=headers.is_packed)


def _num_weights(headers: CheckpointHeaders) -> int:
    return sum(
        tensor.size * _WORDS if tensor.dtype == "uint32" else tensor.size
        for name, tensor in headers.tensors.items()
        if not name.endswith((".scales", ".biases"))
    )


def _kept_bytes(shapes: dict[str, tuple[int, ...]], headers: CheckpointHeaders, item_size: int) -> int:
    """Sum plain tensors by what the configuration needs, packed ones by what the file holds."""
    words = sum(tensor.size for tensor in headers.tensors.values() if tensor.dtype == "uint32")
    packed = [name.removesuffix(".scales") for name in headers.tensors if name.endswith(".scales")]
    if not packed:
        return sum(prod(shape) for shape in shapes.values()) * item_size
    grouped = [
        headers.tensors[f"{path}.{part}"]
        for path in packed
        for part in ("scales", "biases")
        if f"{path}.{part}" in headers.tensors
    ]
    scales = sum(tensor.size * (1 if tensor.dtype == "uint8" else item_size) for tensor in grouped)
    plain = sum(
        tensor.size
        for name, tensor in headers.tensors.items()
        if tensor.dtype != "uint32" and not name.endswith((".scales", ".biases"))
    )
    return words * 4 + scales + plain * item_size


def _repeated_gains(config: ModelConfig, dtype: ElementType) -> int:
    """Return what norms of each head take beyond their tensors: a gain is kept once per head."""
    plan = make_plan(config)
    if plan.family.head_norm != "each":
        return 0
    extra = sum(
        (config.num_attention_heads - 1 + (shape.num_kv_heads - 1 if shape.source is None else 0)) * shape.head_dim
        for shape in plan.shapes
    )
    return extra * _ITEM_SIZES[dtype]


@frozen(kw_only=True)
class SlotPlan:
    """What one row's slot takes; picklable, for whoever admits rows.

    Attributes:
        spec: caches of the layers that own one, in element type of the activations.
        scheme: how keys and values are stored.
    """

    spec: CacheSpec
    scheme: KVScheme

    def size_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a slot once it holds `num_tokens` positions."""
        return sum(
            self.columns(layer, num_tokens) * self.bytes_per_token(index, layer)
            for index, layer in enumerate(self.spec.layers)
        )

    def bytes_per_token(self, index: int, layer: LayerSpec) -> int:
        """Return the bytes of one column of a layer."""
        item_size = _ITEM_SIZES[self.spec.dtype]
        packing = self.scheme.packing_of(index, layer.kind)
        return layer.elements_per_token * item_size if packing is None else packing.bytes_per_token(layer, item_size)

    @staticmethod
    def columns(layer: LayerSpec, num_tokens: int) -> int:
        """Return the columns of a slot: a power of two within its class; a ring at most its window and slack."""
        classes, needed = CapacityClasses(), num_tokens
        if layer.kind == "sliding":
            limit = layer.window + _RING_SLACK
            classes, needed = classes.limited_to(limit), min(num_tokens, limit)
        power = max(_MIN_COLUMNS, 1 << max(0, needed - 1).bit_length())
        return max(needed, min(power, classes.capacity_for(needed)))


@frozen(kw_only=True)
class MemoryPlan:
    """What a loaded model takes for so many rows of so many tokens.

    Attributes:
        weights: what is loaded.
        spec: caches of the layers that own one, in element type of the activations.
        scheme: how keys and values are stored.
        transient: what steps need on top.
        chunk: most prompt tokens of a step.
        max_positions: the model's own limit.
    """

    weights: WeightPlan
    spec: CacheSpec
    scheme: KVScheme
    transient: Transient
    chunk: int
    max_positions: int

    @classmethod
    def make(
        cls, config: ModelConfig, weights: WeightPlan, *, scheme: KVScheme, device: DeviceKind, chunk: int
    ) -> MemoryPlan:
        """Resolve a configuration.

        Raises:
            UnsupportedArchitecture: no family runs the model.
            InvalidScheme: a layer can never be stored as the scheme says.
        """
        plan = make_plan(config)
        layers = [
            _layer_spec(shape.num_kv_heads, shape.head_dim, window)
            for shape, window in zip(plan.shapes, plan.windows, strict=True)
            if shape.source is None
        ]
        spec = CacheSpec(layers=layers, dtype=weights.dtype)
        scheme.check(spec)
        transient = Transient(
            config=config,
            spec=spec,
            scheme=scheme,
            device=device,
            item_size=_ITEM_SIZES[weights.dtype],
            has_exit_norms=plan.family.norms.after_attention is not None,
        )
        return cls(
            weights=weights,
            spec=spec,
            scheme=scheme,
            transient=transient,
            chunk=chunk,
            max_positions=config.max_positions,
        )

    @property
    def slot(self) -> SlotPlan:
        """One row's part."""
        return SlotPlan(spec=self.spec, scheme=self.scheme)

    @property
    def runtime_bytes(self) -> int:
        """The process without the model: interpreter, MLX, BLAS, tokenizer."""
        return _PROCESS_BYTES + _TOKEN_BYTES * self.transient.config.vocab_size

    def row_kv_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one row's slot once it holds `num_tokens` positions."""
        return self.slot.size_bytes(num_tokens)

    def converting_bytes(self, num_tokens: int, rows: int) -> int:
        """Return what rows take that wait for their conversion, stored as they come."""
        return sum(self._converting(num_tokens, rows))

    def _converting(self, num_tokens: int, rows: int) -> list[int]:
        first = first_chunk_length(num_tokens)
        # Prompts shorter than a step's tokens are in it together; seats come in powers of two.
        together = _CONVERTING_ROWS + self.chunk // first
        seats = min(rows, 1 << (together - 1).bit_length())
        return [
            seats * self.slot.columns(layer, first) * layer.elements_per_token * _ITEM_SIZES[self.spec.dtype]
            for index, layer in enumerate(self.spec.layers)
            if self.scheme.packing_of(index, layer.kind) is not None
        ]

    def _growing_bytes(self, num_tokens: int, rows: int) -> int:
        """Return what the buffers of a layer take once more while they grow; layers grow one after the other."""
        kept = [
            rows * self.slot.columns(layer, num_tokens) * self.slot.bytes_per_token(index, layer)
            for index, layer in enumerate(self.spec.layers)
        ]
        return max(kept + self._converting(num_tokens, rows))

    def kv_bytes(self, num_tokens: int, rows: int) -> int:
        """Return the bytes of the slots of `rows` rows of `num_tokens`, with those that wait for their conversion."""
        return rows * self.row_kv_bytes(num_tokens) + self.converting_bytes(num_tokens, rows)

    def transient_bytes(self, num_tokens: int, rows: int) -> int:
        """Return what the most expensive step takes on top."""
        return self.transient.bytes_at(num_tokens, chunk=self.chunk, rows=rows) + self._growing_bytes(num_tokens, rows)

    def device_bytes(self, num_tokens: int, rows: int) -> int:
        """Return the peak of what MLX allocates."""
        return self.weights.size_bytes + self.kv_bytes(num_tokens, rows) + self.transient_bytes(num_tokens, rows)

    def total_bytes(self, num_tokens: int, rows: int) -> int:
        """Return the peak of the whole process, while it loads or later."""
        vocabulary = _LOADING_TOKEN_BYTES * self.transient.config.vocab_size
        loading = self.weights.size_bytes + _PROCESS_BYTES + vocabulary
        return max(self.device_bytes(num_tokens, rows) + self.runtime_bytes, loading)

    def largest_context(self, usable_bytes: int, rows: int) -> int:
        """Return the most positions that `rows` rows may all reach; 0 if not even one each."""
        low, high = 0, self.max_positions
        while low < high:
            middle = (low + high + 1) // 2
            if self.total_bytes(middle, rows) <= usable_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def most_rows(self, usable_bytes: int, num_tokens: int, limit: int) -> int:
        """Return how many rows, at most `limit`, may all reach `num_tokens`; 0 if none."""
        fitting = (rows for rows in range(limit, 0, -1) if self.total_bytes(num_tokens, rows) <= usable_bytes)
        return next(fitting, 0)

    def kv_budget_bytes(self, usable_bytes: int, num_tokens: int, rows: int) -> int:
        """Return the bytes that slots may take together when rows may reach `num_tokens`; 0 if nothing is left."""
        taken = self.weights.size_bytes + self.runtime_bytes + self.transient_bytes(num_tokens, rows)
        return max(0, usable_bytes - taken - self.converting_bytes(num_tokens, rows))


def _layer_spec(num_kv_heads: int, head_dim: int, window: int | None) -> LayerSpec:
    if window is None:
        return LayerSpec.full(num_kv_heads=num_kv_heads, key_head_dim=head_dim, value_head_dim=head_dim)
    return LayerSpec.sliding(window=window, num_kv_heads=num_kv_heads, key_head_dim=head_dim, value_head_dim=head_dim)
