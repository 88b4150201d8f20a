"""From what a gateway tells of itself to readiness and statistics, without a round trip to the engine."""

from headrace_http_api.ports import GatewayCounts, ModelStats, Readiness

__all__ = ["model_stats", "readiness_of"]

_STATUS_COUNTS = (
    "num_running",
    "num_waiting",
    "num_steps",
    "num_prompt_tokens",
    "num_generated_tokens",
    "num_submitted",
    "num_finished",
    "num_failed",
    "num_cancelled",
    "num_restarts",
    "kv_bytes",
)
_INFO_FACTS = ("max_rows", "max_context", "weights_bytes", "device", "representation")


def readiness_of(counts: GatewayCounts) -> Readiness:
    """Tell whether a request sent now would be admitted."""
    state, detail = counts.status.state, counts.status.detail
    if counts.closed and state not in ("failed", "stopped"):
        return Readiness(ready=False, status="draining", detail=detail)
    if state != "ready":
        return Readiness(ready=False, status=state, detail=detail)
    if counts.accepting:
        return Readiness(ready=True, status="ready", detail=detail)
    return Readiness(
        ready=False,
        status="busy",
        detail=f"{counts.num_outstanding} of {counts.max_outstanding} requests are outstanding",
    )


def model_stats(name: str, counts: GatewayCounts) -> ModelStats:
    """Gather one model's entry of `/stats`; facts of an engine that never loaded keep their empty values."""
    gathered: dict[str, object] = {key: getattr(counts.status, key) for key in _STATUS_COUNTS}
    if counts.info is not None:
        gathered |= {key: getattr(counts.info, key) for key in _INFO_FACTS}
    return ModelStats(
        name=name,
        state=counts.status.state,
        num_outstanding=counts.num_outstanding,
        max_outstanding=counts.max_outstanding,
        **gathered,  # pyright: ignore[reportArgumentType]
    )
