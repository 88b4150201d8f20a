"""What an engine is built from. Picklable, because a child process builds its engine from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path  # noqa: TC003 - as below
from typing import Any

from attrs import field, frozen, validators

from headrace_kvcache import KVScheme  # noqa: TC001 - attrs classes are pickled and inspected with their types
from headrace_scheduling.ports import GrammarCompiler, LoadedModel, ModelLoader, PrefixStore, StepRunner
from headrace_scheduling.waiting import DEFAULT_AGEING_S

DEFAULT_PROMPT_CACHE_BYTES = 2 * 1024**3
DEFAULT_STOP_TIMEOUT_S = 10.0


OperationHandler = Callable[[LoadedModel, Any], object]
"""Runs one operation on the engine's thread; its value must be picklable for a child process."""


@frozen(kw_only=True)
class EngineConfig:
    """How to load and run a model.

    Attributes:
        loader: called once on the engine's thread.
        max_rows: most rows of the running batch.
        max_context: most positions of a row; None takes the model's own limit, which is also the ceiling.
        max_waiting: most rows that wait for a slot; further ones are refused.
        ageing_s: seconds after which a waiting batch row counts as interactive.
        prefill_chunk: most prompt tokens that one step computes, all rows together, before running rows get their turn.
        kv_scheme: how keys and values are stored; None keeps them as they come.
        kv_budget_bytes: most bytes of slots, each counted by the capacity of its class; None for no limit.
        slot_bytes: from a number of positions to the bytes of a slot, if the caller knows it; None finds out by a
            forward of one token, and only if there is a budget.
        prompt_cache_bytes: most bytes of stored prefixes; 0 stores none.
        prompt_cache_dir: folder that keeps stored prefixes from one run to the next; only with the usual store. Prompts
            can be read off its files.
        stop_timeout_s: seconds that an engine gets to stop, which includes saving its prefixes.
        handlers: type of an `Exclusive` or `Prepare` operation -> its handler.
        compile_grammar: compiles a request's grammar; None refuses requests that carry one.
        jump_forward: whether tokens that a grammar forces are computed together instead of one a step.
        prefill_streams: streams of a CPU that a step's prompts are dealt among; other devices use one.
        share_blas: divides the threads of the CPU's BLAS among so many streams; 1 gives one all of them.
        make_runner: makes the step runner of a loaded model; None takes `MlxStepRunner`.
        make_store: makes the prefix store of `prompt_cache_bytes`; None takes `headrace_kvcache.PrefixCache`.
    """

    loader: ModelLoader
    max_rows: int = field(default=8, validator=[validators.instance_of(int), validators.ge(1)])
    max_context: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    max_waiting: int = field(default=1024, validator=[validators.instance_of(int), validators.ge(1)])
    ageing_s: float = field(default=DEFAULT_AGEING_S, validator=validators.ge(0))
    prefill_chunk: int = field(default=512, validator=[validators.instance_of(int), validators.ge(1)])
    kv_scheme: KVScheme | None = None
    kv_budget_bytes: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    slot_bytes: Callable[[int], int] | None = None
    prompt_cache_bytes: int = field(default=DEFAULT_PROMPT_CACHE_BYTES, validator=validators.ge(0))
    prompt_cache_dir: Path | None = None
    stop_timeout_s: float = field(default=DEFAULT_STOP_TIMEOUT_S, validator=validators.ge(0))
    handlers: Mapping[type, OperationHandler] = field(factory=dict[type, OperationHandler])
    compile_grammar: GrammarCompiler | None = None
    jump_forward: bool = True
    prefill_streams: int = field(default=1, validator=[validators.instance_of(int), validators.ge(1)])
    share_blas: Callable[[int], None] | None = None
    make_runner: Callable[[LoadedModel, EngineConfig], StepRunner] | None = None
    make_store: Callable[[int], PrefixStore] | None = None
