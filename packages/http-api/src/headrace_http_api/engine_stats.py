"""From what a gateway tells of itself to readiness and statistics, without a round trip to the engine."""

from attrs import evolve

from headrace_http_api.ports import GatewayCounts, ModelStats, Readiness

__all__ = ["model_stats", "readiness_of"]


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
    status, info = counts.status, counts.info
    stats = ModelStats(
        name=name,
        state=status.state,
        num_outstanding=counts.num_outstanding,
        max_outstanding=counts.max_outstanding,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_steps=status.num_steps,
        num_prompt_tokens=status.num_prompt_tokens,
        num_generated_tokens=status.num_generated_tokens,
        num_submitted=status.num_submitted,
        num_finished=status.num_finished,
        num_failed=status.num_failed,
        num_cancelled=status.num_cancelled,
        num_restarts=status.num_restarts,
        num_cached_tokens=status.num_cached_tokens,
        num_prefix_hits=status.num_prefix_hits,
        num_prefix_misses=status.num_prefix_misses,
        kv_bytes=status.kv_bytes,
        kv_reserved_bytes=status.kv_reserved_bytes,
        prefix_bytes=status.prefix_bytes,
    )
    if info is None:
        return stats
    return evolve(
        stats,
        max_rows=info.max_rows,
        max_context=info.max_context,
        weights_bytes=info.weights_bytes,
        device=info.device,
        representation=info.representation,
        kv_scheme=info.kv_scheme,
        kv_budget_bytes=info.kv_budget_bytes,
        max_prefix_bytes=info.prompt_cache_bytes,
    )
