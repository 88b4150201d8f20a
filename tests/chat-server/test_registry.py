"""Laws of the served model: names, readiness, and whose sampling defaults win."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_chat_server.registry import DEFAULT_NAME, SingleModelRegistry
from headrace_chat_server.settings import SamplingSettings
from headrace_chat_server.text_side import TextSide, merge_defaults
from headrace_http_api import ModelNotFound, ModelUnavailable, SamplingDefaults
from headrace_models.config import GenerationDefaults
from headrace_scheduling.errors import EngineGone
from headrace_scheduling.messages import EngineInfo, EngineStatus

INFO = EngineInfo(
    vocab_size=100,
    max_context=64,
    max_rows=2,
    eos_token_ids=frozenset({2}),
    weights_bytes=1,
    device="cpu",
    representation="float32",
    identity="abc",
    pid=1,
)
TEXT_SIDE = TextSide(codec=object(), sampling_defaults=SamplingDefaults(temperature=0.25))


class FakeGateway:
    """Tells what it is told to."""

    def __init__(self, *, state="ready", info=INFO):
        self.state = state
        self.info = info

    def stats(self):
        return SimpleNamespace(
            num_outstanding=0,
            max_outstanding=4,
            closed=False,
            accepting=self.state == "ready",
            status=EngineStatus(state=self.state),
            info=self.info,
        )


def make_registry(gateway=None, *, text_side=TEXT_SIDE):
    registry = SingleModelRegistry(name="m", created=5, gateway=gateway or FakeGateway(), max_tokens=9)
    if text_side is not None:
        registry.provide(text_side)
    return registry


@pytest.mark.parametrize("name", [None, DEFAULT_NAME, "m"])
async def test_each_of_its_names_leases_the_model(name):
    """Absent, `default_model` and the served name are the same model, with the facts of its engine."""
    async with make_registry().lease(name) as served:
        assert (served.name, served.created, served.max_tokens, served.identity) == ("m", 5, 9, "abc")
        assert (served.config.vocab_size, served.config.max_context) == (100, 64)
        assert served.sampling_defaults.temperature == 0.25


@pytest.mark.parametrize("name", ["", "M", "other"])
async def test_other_names_are_not_found(name):
    """Nothing is guessed: a name is served or it is not."""
    with pytest.raises(ModelNotFound):
        async with make_registry().lease(name):
            pass


@pytest.mark.parametrize("info", [None, INFO])
async def test_an_engine_that_failed_for_good_is_not_worth_a_second_try(info):
    """Whether it failed while loading or later, a lease is refused as final."""
    registry = make_registry(FakeGateway(state="failed", info=info))
    with pytest.raises(EngineGone, match="failed"):
        async with registry.lease(None):
            pass


@pytest.mark.parametrize(
    ("gateway", "text_side"), [(FakeGateway(state="loading", info=None), TEXT_SIDE), (FakeGateway(), None)]
)
async def test_what_is_not_loaded_is_neither_leased_nor_ready(gateway, text_side):
    """Without engine or codec a lease is refused and readiness says loading: both tell the same."""
    registry = make_registry(gateway, text_side=text_side)
    assert registry.readiness().status == "loading"
    assert not registry.readiness().ready
    with pytest.raises(ModelUnavailable, match="again"):
        async with registry.lease(None):
            pass


def test_cards_and_statistics_know_the_context_once_the_engine_told():
    """Facts that are not known yet are absent, not invented."""
    (card,) = make_registry().cards()
    assert (card.name, card.created, card.max_context) == ("m", 5, 64)
    (early,) = make_registry(FakeGateway(state="loading", info=None)).cards()
    assert early.max_context is None
    (stats,) = make_registry().stats()
    assert (stats.name, stats.max_rows, stats.weights_bytes) == ("m", 2, 1)


OPTIONAL = st.none() | st.sampled_from([0.0, 0.5, 1.0])
TOP_K = st.none() | st.integers(0, 9)
PARTS = {"temperature": OPTIONAL, "top_p": OPTIONAL, "top_k": TOP_K, "min_p": OPTIONAL}


@given(st.builds(SamplingSettings, **PARTS), st.builds(GenerationDefaults, **PARTS))
def test_the_operator_wins_over_the_model_over_the_built_ins(operator, model):
    """Each default comes from the first that has one; a zero is a value, not an absence."""
    merged = merge_defaults(operator, model)
    for name in PARTS:
        said = [value for value in (getattr(operator, name), getattr(model, name)) if value is not None]
        assert getattr(merged, name) == (said[0] if said else getattr(SamplingDefaults(), name))
