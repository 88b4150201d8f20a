"""Health, readiness, statistics and the list of models."""

import attrs
import pytest

from headrace_http_api import METRIC_NAMES, STATS_KEYS, ModelStats, Readiness, model_stats, readiness_of
from headrace_http_api.observability import STATS
from headrace_scheduling.messages import EngineInfo, EngineStatus


def leaves(value, path=""):
    if not isinstance(value, dict):
        return {path}
    return {leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}" if path else key)}


async def test_stats_body_has_exactly_the_registered_keys(client):
    """`/stats` holds every registered key and no other."""
    body = (await client.get("/stats")).json()
    body["models"]["*"] = body["models"].pop("org/tiny")

    assert leaves(body) == set(STATS_KEYS)
    assert body["server"]["uptime_s"] == 60.0
    assert body["models"]["*"]["batch"]["running"] == 3


def test_registry_names_each_fact_once_and_misses_none():
    """Keys and metric names are unique, counters end in `_total`, and every count of a model is told."""
    told = {stat.attribute for stat in STATS if stat.key.startswith("models.")}

    assert len(set(STATS_KEYS)) == len(STATS_KEYS)
    assert len(set(METRIC_NAMES)) == len(METRIC_NAMES)
    assert told | {"name"} == {one.name for one in attrs.fields(ModelStats)}
    for stat in STATS:
        assert (stat.kind == "info") == (stat.metric is None)
        assert stat.metric is None or stat.metric.startswith("headrace_")
        assert (stat.kind == "counter") == (stat.metric or "").endswith("_total")


@pytest.mark.parametrize(
    ("status", "ready", "health"),
    [
        ("ready", True, "ok"),
        ("busy", False, "ok"),
        ("draining", False, "ok"),
        ("loading", False, "degraded"),
        ("restarting", False, "degraded"),
        ("failed", False, "degraded"),
    ],
)
async def test_health_and_readiness_tell_the_state(client, models, status, ready, health):
    """`/health` answers 200 while the process does; `/ready` only when a request would be admitted now."""
    models.state = Readiness(ready=ready, status=status, detail="why")

    health_reply = await client.get("/health")
    ready_reply = await client.get("/ready")

    assert (health_reply.status_code, health_reply.json()["status"]) == (200, health)
    assert ready_reply.status_code == (200 if ready else 503)
    assert ready_reply.json() == {"ready": ready, "status": status, "detail": "why"}
    # Nobody need come back to an engine that has failed for good.
    assert ("retry-after" in ready_reply.headers) == (not ready and status != "failed")


@attrs.frozen(kw_only=True)
class Counts:
    status: EngineStatus
    num_outstanding: int = 2
    max_outstanding: int = 4
    closed: bool = False
    accepting: bool = True
    info: EngineInfo | None = None


@pytest.mark.parametrize(
    ("state", "closed", "accepting", "expected"),
    [
        ("ready", False, True, (True, "ready")),
        ("ready", False, False, (False, "busy")),
        ("ready", True, False, (False, "draining")),
        ("loading", False, False, (False, "loading")),
        ("restarting", False, False, (False, "restarting")),
        ("failed", True, False, (False, "failed")),
    ],
)
def test_readiness_follows_the_gateway(state, closed, accepting, expected):
    """Ready means that the engine is up, the gateway open and the queue not full."""
    got = readiness_of(Counts(status=EngineStatus(state=state), closed=closed, accepting=accepting))

    assert (got.ready, got.status) == expected


def test_model_stats_join_status_and_facts():
    """One entry holds the engine's counts and, once it loaded, its facts."""
    info = EngineInfo(
        vocab_size=9,
        max_context=64,
        max_rows=8,
        eos_token_ids=frozenset(),
        weights_bytes=5,
        device="cpu",
        representation="float32",
        identity="x",
        pid=1,
    )
    status = EngineStatus(state="ready", num_running=2, kv_bytes=7)

    loaded = model_stats("m", Counts(status=status, info=info))
    unloaded = model_stats("m", Counts(status=EngineStatus(state="loading")))

    assert (loaded.num_running, loaded.kv_bytes, loaded.max_rows, loaded.device) == (2, 7, 8, "cpu")
    assert (unloaded.state, unloaded.max_rows, unloaded.max_outstanding) == ("loading", 0, 4)


async def test_models_are_listed_and_found_by_name(client):
    """The list holds cards, a card is found by its name with a slash in it, and an unknown one is a 404."""
    listed = (await client.get("/v1/models")).json()
    one = await client.get("/v1/models/org/tiny")
    unknown = await client.get("/v1/models/gpt-4")

    assert listed["object"] == "list"
    assert listed["data"] == [one.json()]
    assert (one.json()["id"], one.json()["context_window"]) == ("org/tiny", 512)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_about_lists_the_paths(client):
    """`/v1` tells who serves what, and where."""
    body = (await client.get("/v1")).json()

    assert (body["name"], body["version"], body["model"]) == ("headrace", "0.1.0", "org/tiny")
    assert "/v1/chat/completions" in body["endpoints"]
