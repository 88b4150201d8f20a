"""`/v1`, `/health`, `/ready` and `/stats`: answered from the last published status, also during a prefill."""

from collections.abc import Sequence
from typing import Literal

from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from headrace_http_api.ports import ModelStats
from headrace_http_api.services import ApiServices

__all__ = ["METRIC_NAMES", "STATS", "STATS_KEYS", "Stat", "routes", "stats_body"]

RETRY_AFTER_S = 5


@frozen
class Stat:
    """One fact of `/stats`.

    Attributes:
        key: its place in the body; `models.*.` stands for each served model's name.
        attribute: of `ModelStats`, `ServerInfo` (or `uptime_s`) or `StreamCounts`.
        metric: its metric name with the unit; None for facts that are no number.
        kind: how the number moves.
    """

    key: str
    attribute: str
    kind: Literal["info", "gauge", "counter"]
    metric: str | None = None


STATS: tuple[Stat, ...] = (
    Stat("server.name", "name", "info"),
    Stat("server.version", "version", "info"),
    Stat("server.started_at", "started_at", "gauge", "headrace_start_time_seconds"),
    Stat("server.uptime_s", "uptime_s", "gauge", "headrace_uptime_seconds"),
    Stat("server.streams.open", "num_open", "gauge", "headrace_streams_open"),
    Stat("server.streams.left", "num_left", "counter", "headrace_streams_left_total"),
    Stat("server.streams.dropped", "num_dropped", "counter", "headrace_streams_dropped_total"),
    Stat("models.*.state", "state", "info"),
    Stat("models.*.device", "device", "info"),
    Stat("models.*.representation", "representation", "info"),
    Stat("models.*.kv_scheme", "kv_scheme", "info"),
    Stat("models.*.max_context", "max_context", "gauge", "headrace_max_context_tokens"),
    Stat("models.*.weights_bytes", "weights_bytes", "gauge", "headrace_weights_bytes"),
    Stat("models.*.restarts", "num_restarts", "counter", "headrace_engine_restarts_total"),
    Stat("models.*.requests.outstanding", "num_outstanding", "gauge", "headrace_requests_outstanding"),
    Stat("models.*.requests.max_outstanding", "max_outstanding", "gauge", "headrace_requests_outstanding_limit"),
    Stat("models.*.requests.submitted", "num_submitted", "counter", "headrace_requests_submitted_total"),
    Stat("models.*.requests.finished", "num_finished", "counter", "headrace_requests_finished_total"),
    Stat("models.*.requests.failed", "num_failed", "counter", "headrace_requests_failed_total"),
    Stat("models.*.requests.cancelled", "num_cancelled", "counter", "headrace_requests_cancelled_total"),
    Stat("models.*.batch.max_rows", "max_rows", "gauge", "headrace_batch_rows_limit"),
    Stat("models.*.batch.running", "num_running", "gauge", "headrace_batch_rows_running"),
    Stat("models.*.batch.waiting", "num_waiting", "gauge", "headrace_batch_rows_waiting"),
    Stat("models.*.batch.steps", "num_steps", "counter", "headrace_steps_total"),
    Stat("models.*.batch.kv_bytes", "kv_bytes", "gauge", "headrace_kv_cache_bytes"),
    Stat("models.*.batch.kv_budget_bytes", "kv_budget_bytes", "gauge", "headrace_kv_budget_bytes"),
    Stat("models.*.batch.kv_reserved_bytes", "kv_reserved_bytes", "gauge", "headrace_kv_reserved_bytes"),
    Stat("models.*.prefixes.bytes", "prefix_bytes", "gauge", "headrace_prefix_cache_bytes"),
    Stat("models.*.prefixes.max_bytes", "max_prefix_bytes", "gauge", "headrace_prefix_cache_limit_bytes"),
    Stat("models.*.prefixes.hits", "num_prefix_hits", "counter", "headrace_prefix_cache_hits_total"),
    Stat("models.*.prefixes.misses", "num_prefix_misses", "counter", "headrace_prefix_cache_misses_total"),
    Stat("models.*.tokens.cached", "num_cached_tokens", "counter", "headrace_cached_tokens_total"),
    Stat("models.*.tokens.prompt", "num_prompt_tokens", "counter", "headrace_prompt_tokens_total"),
    Stat("models.*.tokens.generated", "num_generated_tokens", "counter", "headrace_generated_tokens_total"),
)
STATS_KEYS: tuple[str, ...] = tuple(stat.key for stat in STATS)
METRIC_NAMES: tuple[str, ...] = tuple(stat.metric for stat in STATS if stat.metric is not None)


def stats_body(services: ApiServices) -> dict[str, object]:
    """Build the body of `/stats` from the registry of its keys."""
    server = {
        "name": services.server.name,
        "version": services.server.version,
        "started_at": services.server.started_at,
        "uptime_s": max(0.0, services.clock() - services.server.started_at),
        "streams": {
            "open": services.streams.num_open,
            "left": services.streams.num_left,
            "dropped": services.streams.num_dropped,
        },
    }
    body: dict[str, object] = {"server": server, "models": {}}
    for stats in services.models.stats():
        _put_model(body, stats)
    return body


def routes(services: ApiServices) -> Sequence[BaseRoute]:
    """Routes that tell how the server is."""

    async def about(request: Request) -> JSONResponse:
        cards = services.models.cards()
        paths = sorted({route.path for route in request.app.routes if isinstance(route, Route)})
        return JSONResponse(
            {
                "name": services.server.name,
                "version": services.server.version,
                "model": cards[0].name if cards else None,
                "endpoints": paths,
            }
        )

    async def health(_request: Request) -> JSONResponse:
        readiness = services.models.readiness()
        is_ok = readiness.status in ("ready", "busy", "draining")
        body = {
            "status": "ok" if is_ok else "degraded",
            "engine": readiness.status,
            "detail": readiness.detail,
        }
        return JSONResponse(body)

    async def ready(_request: Request) -> JSONResponse:
        readiness = services.models.readiness()
        body = {"ready": readiness.ready, "status": readiness.status, "detail": readiness.detail}
        if readiness.ready:
            return JSONResponse(body)
        # What has failed stays so until somebody starts the server again.
        headers = {} if readiness.status == "failed" else {"retry-after": str(RETRY_AFTER_S)}
        return JSONResponse(body, status_code=503, headers=headers)

    async def stats(_request: Request) -> JSONResponse:
        return JSONResponse(stats_body(services))

    return [Route("/v1", about), Route("/health", health), Route("/ready", ready), Route("/stats", stats)]


def _put_model(body: dict[str, object], stats: ModelStats) -> None:
    models = body["models"]
    assert isinstance(models, dict)
    entry: dict[str, object] = {}
    models[stats.name] = entry
    for stat in STATS:
        root, _, rest = stat.key.partition(".*.")
        if root != "models":
            continue
        *groups, leaf = rest.split(".")
        place = entry
        for group in groups:
            place = place.setdefault(group, {})
            assert isinstance(place, dict)
        place[leaf] = getattr(stats, stat.attribute)
