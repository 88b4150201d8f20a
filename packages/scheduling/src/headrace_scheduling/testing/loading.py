"""Picklable loaders and configurations of an engine without a model."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from attrs import field, frozen

from headrace_scheduling.config import EngineConfig
from headrace_scheduling.testing.steps import FakeStepRunner
from headrace_scheduling.testing.store import FakePrefixStore
from headrace_scheduling.testing.text import EOS_TOKEN_ID, VOCAB_SIZE, FakeCodec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_scheduling.config import OperationHandler
    from headrace_scheduling.ports import LoadedModel, RuntimeModel


@frozen(kw_only=True)
class FakeFacts:
    """Facts of a model that does not exist."""

    vocab_size: int = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN_ID})
    max_positions: int = 4096


@frozen(kw_only=True)
class FakeLoadedModel:
    """What a fake loader returns; `model` is anything with the fitting shape."""

    model: RuntimeModel
    codec: FakeCodec = field(factory=FakeCodec)
    identity: str = "fake"
    device: str = "none"
    representation: str = "none"


class _NoModel:
    """Has facts but cannot run; for engines whose runner is a `FakeStepRunner`."""

    def __init__(self, facts: FakeFacts) -> None:
        self.config = facts
        self.weights_bytes = 0


@frozen(kw_only=True)
class FakeLoader:
    """A picklable loader.

    Attributes:
        error: loading raises this message as a ValueError.
        failing_decoders: as in `FakeCodec`.
    """

    max_positions: int = 4096
    error: str | None = None
    failing_decoders: frozenset[int] = frozenset()

    def __call__(self) -> FakeLoadedModel:
        if self.error is not None:
            raise ValueError(self.error)
        model = _NoModel(FakeFacts(max_positions=self.max_positions))
        # The fake runner never calls the model.
        return FakeLoadedModel(model=model, codec=FakeCodec(failing_decoders=self.failing_decoders))  # type: ignore[arg-type]


@frozen(kw_only=True)
class FakeRunnerFactory:
    """A picklable maker of `FakeStepRunner`; the fields are its arguments."""

    failing_dispatches: frozenset[int] = frozenset()
    failing_collects: frozenset[int] = frozenset()
    exit_token: int | None = None

    def __call__(self, loaded: LoadedModel, config: EngineConfig) -> FakeStepRunner:
        del loaded, config
        return FakeStepRunner(
            failing_dispatches=self.failing_dispatches,
            failing_collects=self.failing_collects,
            exit_token=self.exit_token,
        )


def fake_config(
    *,
    loader: FakeLoader | None = None,
    runner: FakeRunnerFactory | None = None,
    max_rows: int = 4,
    prefill_chunk: int = 512,
    handlers: Mapping[type, OperationHandler] | None = None,
    prompt_cache_bytes: int = 0,
    kv_budget_bytes: int | None = None,
) -> EngineConfig:
    """Make the configuration of an engine on `FakeStepRunner`: every row repeats its prompt."""
    return EngineConfig(
        loader=FakeLoader() if loader is None else loader,
        make_runner=FakeRunnerFactory() if runner is None else runner,
        max_rows=max_rows,
        prefill_chunk=prefill_chunk,
        handlers=handlers or {},
        prompt_cache_bytes=prompt_cache_bytes,
        kv_budget_bytes=kv_budget_bytes,
        make_store=FakePrefixStore,
    )


def unpicklable_value(loaded: LoadedModel, operation: object) -> object:
    """Handle an operation with a value that cannot leave the engine's process."""
    del loaded, operation
    return threading.Lock()
