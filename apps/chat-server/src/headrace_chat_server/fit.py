"""The command `headrace fit`, and the same decision before anything is served."""

import json
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import asdict, frozen

from headrace_chat_server.console import say, table
from headrace_chat_server.errors import ModelUnavailable
from headrace_chat_server.models import find_model, require_backend
from headrace_chat_server.settings import Dtype, EngineSettings
from headrace_kvcache import InvalidScheme, KVScheme

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_models import FitReport, ModelSource

__all__ = ["ServingLimits", "check_fit", "describe", "kv_scheme", "run_fit"]

_LOGGER = logging.getLogger(__name__)
_LEAST_CONTEXT = 256


@frozen(kw_only=True)
class ServingLimits:
    """What admission may use; picklable.

    Attributes:
        max_context: most tokens of a row that runs alone.
        kv_budget_bytes: bytes of all slots together.
        prompt_cache_bytes: bytes of stored prompts.
        slot_bytes: from a number of positions to the bytes of a slot.
    """

    max_context: int
    kv_budget_bytes: int
    prompt_cache_bytes: int
    slot_bytes: Callable[[int], int]


def run_fit(
    model: str | None, *, context: int | None, rows: int, kv: str, dtype: Dtype, prefill_chunk: int, as_json: bool
) -> int:
    """Print what a model takes on this machine; 0 if it fits, else 1.

    Raises:
        ModelUnavailable: the model cannot be found or read, or cannot be stored as `kv` says.
    """
    require_backend()
    source = find_model(model)
    report = _report(source, context=context, rows=rows, kv=kv, dtype=dtype, prefill_chunk=prefill_chunk)
    if as_json:
        sys.stdout.write(json.dumps(to_json(report), indent=2) + "\n")
    else:
        table(describe(report), title=f"{source.name} on this machine")
        say(report.verdict[0].upper() + report.verdict[1:] + ".")
    return 0 if report.fits else 1


def check_fit(settings: EngineSettings, source: "ModelSource") -> ServingLimits | None:
    """Decide before a byte is allocated whether a model can be served; None if memory sets no limits.

    One row must fit beside the weights, in a context of a few hundred tokens; more rows wait for their turn. What is
    left beside weights, a step and stored prompts bounds the context and the bytes of slots.

    Raises:
        ModelUnavailable: the model does not fit, with what to change.
    """
    report = _report(
        source,
        context=_LEAST_CONTEXT,
        rows=1,
        kv=settings.kv,
        dtype=settings.dtype,
        prefill_chunk=settings.prefill_chunk,
    )
    if not report.fits:
        if not settings.ignore_fit:
            raise ModelUnavailable(f"the model {source.name!r} {report.verdict}; --ignore-fit tries all the same")
        _LOGGER.warning("the model %r is loaded although it %s", source.name, report.verdict)
        return None
    # Stored prompts give way first: they may take at most half of what is left beside a row.
    spare = report.usable.size_bytes - report.total_bytes
    prompt_cache_bytes = min(settings.prompt_cache, spare // 2)
    if prompt_cache_bytes < settings.prompt_cache:
        _LOGGER.warning("memory bounds stored prompts to %d of %d bytes", prompt_cache_bytes, settings.prompt_cache)
    usable_bytes = report.usable.size_bytes - prompt_cache_bytes
    max_context = report.plan.largest_context(usable_bytes, 1)
    if max_context < report.plan.max_positions:
        _LOGGER.warning("memory bounds the context to %d of %d tokens", max_context, report.plan.max_positions)
    budget = report.plan.kv_budget_bytes(usable_bytes, max_context, settings.max_rows)
    budget = max(budget, report.plan.row_kv_bytes(max_context))
    if settings.kv_budget is not None:
        budget = min(budget, settings.kv_budget)
    return ServingLimits(
        max_context=max_context,
        kv_budget_bytes=budget,
        prompt_cache_bytes=prompt_cache_bytes,
        slot_bytes=report.plan.slot.size_bytes,
    )


def _report(
    source: "ModelSource", *, context: int | None, rows: int, kv: str, dtype: Dtype, prefill_chunk: int
) -> "FitReport":
    from headrace_models import ModelError, fit_source

    try:
        return fit_source(
            source,
            num_tokens=context,
            rows=rows,
            scheme=kv_scheme(kv, source.path),
            dtype=dtype,
            chunk=prefill_chunk,
        )
    except (ModelError, InvalidScheme) as error:
        raise ModelUnavailable(f"the model {source.name!r} cannot be served: {error}") from error


def describe(report: "FitReport") -> list[tuple[str, str]]:
    """List the sums by name, for people."""
    left_out = ", ".join(sorted(report.left_out))
    return [
        ("weights", f"{_shown(report.weights_bytes)} ({report.representation})"),
        *([("not loaded", f"{left_out}: text alone is served")] if left_out else []),
        ("keys and values", f"{_shown(report.kv_bytes)} for {report.rows} x {report.num_tokens} tokens"),
        ("one step", f"{_shown(report.transient_bytes)} at most"),
        ("the process", _shown(report.runtime_bytes)),
        ("together", _shown(report.total_bytes)),
        ("usable", f"{_shown(report.usable.size_bytes)}, {report.usable.origin}"),
        ("largest context", f"{report.max_context} tokens for each of {report.rows}"),
        ("largest context alone", f"{report.max_context_alone} of the model's {report.plan.max_positions} tokens"),
    ]


def to_json(report: "FitReport") -> dict[str, object]:
    """Return the report as JSON has it; sizes in bytes."""
    values: dict[str, object] = asdict(
        report, recurse=False, filter=lambda attribute, _: attribute.name not in ("plan", "usable")
    )
    usable: dict[str, object] = {"usable_bytes": report.usable.size_bytes, "usable_origin": report.usable.origin}
    sums: dict[str, object] = {"device_bytes": report.device_bytes, "total_bytes": report.total_bytes}
    return values | usable | sums | {"fits": report.fits, "verdict": report.verdict}


def kv_scheme(text: str, model_path: "Path | None") -> KVScheme | None:
    """Read a KV scheme; None for unquantized.

    Args:
        model_path: folder or file of the model, where "config" looks for `kv_config.json`.

    Raises:
        ModelUnavailable: the scheme cannot be used.
    """
    if text == "off":
        return None
    folder = None if model_path is None else model_path if model_path.is_dir() else model_path.parent
    try:
        return KVScheme.parse(text, kv_config=folder)
    except InvalidScheme as error:
        raise ModelUnavailable(f"kv is {text!r}: {error}") from error


def _shown(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3f} GB"
