"""Whether a model fits: decided from headers before a byte is allocated, with what to change if it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from headrace_kvcache import InvalidScheme, KVScheme
from headrace_models.config import read_config
from headrace_models.headers import read_headers
from headrace_models.memory_plan import MemoryPlan, plan_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_models.config import ModelConfig
    from headrace_models.device import DeviceKind
    from headrace_models.dtypes import DtypeName
    from headrace_models.headers import CheckpointHeaders
    from headrace_models.sources import ModelSource
    from headrace_models.usable_memory import UsableMemory

__all__ = ["FitReport", "fit", "fit_source"]

DEFAULT_CHUNK = 512
_SMALLER_SCHEMES = (8, 4)


@frozen(kw_only=True)
class FitReport:
    """What a model takes on a device with `rows` rows of `num_tokens` tokens, and whether that fits. Sizes in bytes.

    Attributes:
        weights_bytes: as the device will hold them.
        kv_bytes: slots of all rows, and rows that wait for their conversion.
        transient_bytes: the most expensive step: a prefill chunk, or a decode step of all rows.
        runtime_bytes: the process without the model.
        prefix_bytes: set aside for stored prompt prefixes.
        usable: memory that may be taken, and who says so.
        max_context: the most tokens that each of the rows may reach; 0 if the model does not fit at all.
        max_context_alone: the same for one row.
        representation: element type of activations and caches, and whether weights stay packed.
        left_out: how many tensors of the checkpoint are not loaded because their part is no text model, by part.
        advice: what to change, the least costly first; empty if it fits.
        plan: the arithmetic behind, for whoever admits rows.
    """

    num_tokens: int
    rows: int
    weights_bytes: int
    kv_bytes: int
    transient_bytes: int
    runtime_bytes: int
    prefix_bytes: int
    usable: UsableMemory
    max_context: int
    max_context_alone: int
    representation: str
    left_out: Mapping[str, int]
    advice: tuple[str, ...]
    plan: MemoryPlan

    @property
    def device_bytes(self) -> int:
        """Peak of what MLX allocates."""
        return self.weights_bytes + self.kv_bytes + self.transient_bytes

    @property
    def total_bytes(self) -> int:
        """Peak of the process."""
        return self.device_bytes + self.runtime_bytes + self.prefix_bytes

    @property
    def fits(self) -> bool:
        """Whether everything is within the usable memory and the model's own limit of positions."""
        return self.total_bytes <= self.usable.size_bytes and self.num_tokens <= self.plan.max_positions

    @property
    def kv_budget_bytes(self) -> int:
        """Bytes that slots may take together: what is left beside weights, runtime, prefixes and a step."""
        usable_bytes = self.usable.size_bytes - self.prefix_bytes
        return self.plan.kv_budget_bytes(usable_bytes, max(1, self.max_context_alone), self.rows)

    @property
    def verdict(self) -> str:
        """One sentence; with advice where it does not fit."""
        asked = f"{self.rows} row{'s' if self.rows != 1 else ''} of {self.num_tokens} tokens"
        figures = f"{_shown(self.total_bytes)} of {_shown(self.usable.size_bytes)}, {self.usable.origin}"
        if self.fits:
            return f"fits: {asked} take {figures}"
        return f"does not fit: {asked} take {figures}; {'; '.join(self.advice)}"


def fit(
    config: ModelConfig,
    headers: CheckpointHeaders,
    *,
    num_tokens: int,
    rows: int,
    device: DeviceKind,
    usable: UsableMemory,
    memory_bytes: int,
    scheme: KVScheme | None = None,
    dtype: DtypeName = "auto",
    chunk: int = DEFAULT_CHUNK,
    prefix_bytes: int = 0,
) -> FitReport:
    """Decide from a configuration and headers whether a model fits. Pure; imports no mlx.

    Args:
        num_tokens: positions that each row reaches, prompt and reply together.
        rows: rows that run at once; 1 where the scheme has no slots to share.
        usable: memory that may be taken.
        memory_bytes: the machine's memory, which decides what `dtype="auto"` is on a CPU.
        scheme: how keys and values are stored; None keeps them as they come.
        chunk: most prompt tokens of a step.
        prefix_bytes: memory that stored prefixes may take.

    Raises:
        ValueError: a count below 1.
        UnsupportedArchitecture: no family runs the model.
        InvalidScheme: a layer can never be stored as the scheme says.
    """
    for name, value in (("num_tokens", num_tokens), ("rows", rows), ("chunk", chunk)):
        if value < 1:
            raise ValueError(f"{name} is {value!r}; it must be at least 1")
    weights = plan_weights(config, headers, dtype=dtype, device=device, memory_bytes=memory_bytes)
    scheme = KVScheme.unquantized() if scheme is None else scheme
    rows = 1 if scheme.kind == "turbo" else rows
    plan = MemoryPlan.make(config, weights, scheme=scheme, device=device, chunk=chunk)
    left = usable.size_bytes - prefix_bytes
    report = FitReport(
        num_tokens=num_tokens,
        rows=rows,
        weights_bytes=weights.size_bytes,
        kv_bytes=plan.kv_bytes(num_tokens, rows),
        transient_bytes=plan.transient_bytes(num_tokens, rows),
        runtime_bytes=plan.total_bytes(num_tokens, rows) - plan.device_bytes(num_tokens, rows),
        prefix_bytes=prefix_bytes,
        usable=usable,
        max_context=plan.largest_context(left, rows),
        max_context_alone=plan.largest_context(left, 1),
        representation=f"{weights.dtype}, packed" if weights.is_packed else weights.dtype,
        left_out=headers.left_out,
        advice=(),
        plan=plan,
    )
    if report.fits:
        return report
    lighter = plan_weights(config, headers, dtype="checkpoint", device=device, memory_bytes=memory_bytes)
    return evolve(report, advice=tuple(_advice(report, left, lighter.size_bytes)))


def fit_source(
    source: ModelSource,
    *,
    num_tokens: int | None = None,
    rows: int = 1,
    scheme: KVScheme | None = None,
    dtype: DtypeName = "auto",
    chunk: int = DEFAULT_CHUNK,
    prefix_bytes: int = 0,
) -> FitReport:
    """As `fit`, for a model's files on this machine's device; reads headers, and imports mlx where that may be a GPU.

    Args:
        num_tokens: None is the model's longest context.

    Raises:
        as `fit`, and ModelError for files that are not read.
    """
    from headrace_models.gguf_file import read_gguf
    from headrace_models.usable_memory import device_and_memory, usable_memory

    gguf = read_gguf(source.path) if source.format == "gguf" else None
    config = read_config(source, gguf=gguf)
    device, memory_bytes = device_and_memory()
    return fit(
        config,
        read_headers(source, gguf=gguf),
        num_tokens=config.max_positions if num_tokens is None else num_tokens,
        rows=rows,
        device=device,
        usable=usable_memory(device),
        memory_bytes=memory_bytes,
        scheme=scheme,
        dtype=dtype,
        chunk=chunk,
        prefix_bytes=prefix_bytes,
    )


def _advice(report: FitReport, left: int, lighter_bytes: int) -> list[str]:
    """List what would make it fit, each line by itself."""
    plan, num_tokens, rows = report.plan, report.num_tokens, report.rows
    if num_tokens > plan.max_positions:
        return [f"the model takes at most {plan.max_positions} tokens: ask for a smaller context"]
    found: list[str] = []
    if report.max_context:
        found.append(f"ask for a context of at most {report.max_context} tokens")
    fewer = plan.most_rows(left, num_tokens, rows - 1)
    if fewer:
        found.append(f"run at most {fewer} row{'s' if fewer != 1 else ''}")
    found += [f"store keys and values in {bits} bits" for bits in _SMALLER_SCHEMES if _fits_packed(report, left, bits)]
    if lighter_bytes < report.weights_bytes and report.total_bytes - report.weights_bytes + lighter_bytes <= (
        report.usable.size_bytes
    ):
        found.append(f"keep the checkpoint's own weights, {_shown(lighter_bytes)} (--dtype checkpoint)")
    if report.prefix_bytes and report.total_bytes - report.prefix_bytes <= report.usable.size_bytes:
        found.append("set less aside for stored prompts (--prompt-cache)")
    if not found:
        found.append(f"take a smaller model or one of fewer bits: {_shown(report.weights_bytes)} are its weights")
    return found if report.usable.advice is None else [*found, report.usable.advice]


def _fits_packed(report: FitReport, left: int, bits: int) -> bool:
    plan = report.plan
    if plan.scheme.kind != "unquantized":
        return False
    scheme = KVScheme.uniform(bits)
    try:
        scheme.check(plan.spec)
    except InvalidScheme:
        return False
    packed = evolve(plan, scheme=scheme, transient=evolve(plan.transient, scheme=scheme))
    return packed.total_bytes(report.num_tokens, report.rows) <= left


def _shown(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
