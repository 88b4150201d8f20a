"""What an engine is built from. Picklable, because a child process builds its engine from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen, validators

from headrace_scheduling.ports import LoadedModel, ModelLoader, StepRunner


@frozen
class ChildSetup:
    """What a child process needs before it can unpickle its `EngineConfig`."""

    sys_path: tuple[str, ...]
    log_level: int


OperationHandler = Callable[[LoadedModel, Any], object]
"""Runs one operation on the engine's thread; its value must be picklable for a child process."""


@frozen(kw_only=True)
class EngineConfig:
    """How to load and run a model.

    Attributes:
        loader: called once on the engine's thread.
        max_rows: most rows of the running batch.
        max_context: most positions of a row; None takes the model's own limit, which is also the ceiling.
        prefill_chunk: most prompt tokens that one step computes before running rows get their turn.
        handlers: type of an `Exclusive` or `Prepare` operation -> its handler.
        make_runner: makes the step runner of a loaded model; None takes `MlxStepRunner`.
    """

    loader: ModelLoader
    max_rows: int = field(default=8, validator=[validators.instance_of(int), validators.ge(1)])
    max_context: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    prefill_chunk: int = field(default=512, validator=[validators.instance_of(int), validators.ge(1)])
    handlers: Mapping[type, OperationHandler] = field(factory=dict[type, OperationHandler])
    make_runner: Callable[[LoadedModel, EngineConfig], StepRunner] | None = None
