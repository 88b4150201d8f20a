"""From a configuration to an engine: loads the model, makes its slots, its scheduler and its prefix store."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from headrace_kvcache import KVBudget, KVScheme
from headrace_scheduling.engine import EngineLoop, EngineParts
from headrace_scheduling.errors import EngineUnavailable
from headrace_scheduling.messages import EngineInfo
from headrace_scheduling.prefix_archive import PrefixArchive
from headrace_scheduling.prefixes import Prefixes
from headrace_scheduling.scheduler import BatchScheduler
from headrace_scheduling.slot_budget import SlotBudget
from headrace_scheduling.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_scheduling.config import EngineConfig
    from headrace_scheduling.inbox import Inbox
    from headrace_scheduling.messages import StepEvents
    from headrace_scheduling.ports import LoadedModel, PrefixStore, StepRunner

MAX_ROWS_IS_1 = "max-rows-is-1"


def load_engine(config: EngineConfig, *, inbox: Inbox, publish: Callable[[StepEvents], None]) -> EngineLoop:
    """Load the model and build its loop, both on the calling thread, which must also run it.

    Raises:
        EngineUnavailable: the KV budget does not hold a single row.
        Exception: what the loader or the runner raised.
    """
    loaded = config.loader()
    return make_loop(loaded, make_runner(loaded, config), config, inbox=inbox, publish=publish)


def make_loop(
    loaded: LoadedModel,
    runner: StepRunner,
    config: EngineConfig,
    *,
    inbox: Inbox,
    publish: Callable[[StepEvents], None],
    clock: Callable[[], float] = time.perf_counter,
) -> EngineLoop:
    """Build the loop of a loaded model and its runner. Raises as `load_engine`."""
    parts = assemble(loaded, runner, config, clock=clock)
    return EngineLoop(parts, config, inbox=inbox, publish=publish, clock=clock)


def make_runner(loaded: LoadedModel, config: EngineConfig) -> StepRunner:
    """Make the step runner of a loaded model."""
    if config.make_runner is not None:
        return config.make_runner(loaded, config)
    from headrace_scheduling.runner import make_mlx_runner

    return make_mlx_runner(loaded, config)


def assemble(
    loaded: LoadedModel, runner: StepRunner, config: EngineConfig, *, clock: Callable[[], float]
) -> EngineParts:
    """Put an engine together."""
    budget = None
    if config.kv_budget_bytes is not None:
        budget = SlotBudget(KVBudget(config.kv_budget_bytes), config.slot_bytes or runner.slot_bytes)
    info = describe(loaded, runner, config, budget)
    store, archive = _make_store(config, info)
    scheduler = BatchScheduler(
        info.max_rows,
        info.max_context,
        prefill_chunk=config.prefill_chunk,
        traits=runner.traits,
        budget=budget,
        prefixes=Prefixes(store),
        waiting=WaitingQueue(config.ageing_s),
        clock=clock,
    )
    return EngineParts(loaded=loaded, runner=runner, scheduler=scheduler, info=info, archive=archive)


def describe(
    loaded: LoadedModel, runner: StepRunner, config: EngineConfig, budget: SlotBudget | None = None
) -> EngineInfo:
    """State the facts of a loaded model under a configuration.

    Raises:
        EngineUnavailable: the KV budget does not hold a single row.
    """
    facts = loaded.model.config
    max_context = facts.max_positions if config.max_context is None else min(config.max_context, facts.max_positions)
    if budget is not None:
        max_context = budget.largest_context(max_context)
        if max_context < 2:
            raise EngineUnavailable(
                f"kv_budget_bytes is {config.kv_budget_bytes}; the smallest slot of this model takes "
                f"{budget.least_bytes} bytes: raise the budget, or store keys and values in fewer bits"
            )
    serial_reasons = runner.serial_reasons or ((MAX_ROWS_IS_1,) if config.max_rows == 1 else ())
    return EngineInfo(
        vocab_size=facts.vocab_size,
        max_context=max_context,
        max_rows=1 if serial_reasons else config.max_rows,
        eos_token_ids=facts.eos_token_ids,
        weights_bytes=loaded.model.weights_bytes,
        device=loaded.device,
        representation=loaded.representation,
        identity=loaded.identity,
        pid=os.getpid(),
        kv_scheme=name_scheme(config.kv_scheme),
        serial_reasons=serial_reasons,
        prompt_cache_bytes=config.prompt_cache_bytes,
        kv_budget_bytes=config.kv_budget_bytes,
        has_grammar=config.compile_grammar is not None,
    )


def name_scheme(scheme: KVScheme | None) -> str:
    """Name a scheme without the element type, which the representation of the weights implies."""
    if scheme is None or scheme.kind == "unquantized":
        return "unquantized"
    return scheme.for_dtype("float32").key.replace("-float32", "", 1)


def _make_store(config: EngineConfig, info: EngineInfo) -> tuple[PrefixStore | None, PrefixArchive | None]:
    if not config.prompt_cache_bytes:
        return None, None
    if config.make_store is not None:
        return config.make_store(config.prompt_cache_bytes), None
    from headrace_kvcache import PrefixCache, PrefixFolder

    cache = PrefixCache(config.prompt_cache_bytes)
    if config.prompt_cache_dir is None:
        return cache, None
    identity = json.dumps({"model": info.identity, "kv_scheme": info.kv_scheme}, sort_keys=True)
    folder = PrefixFolder(config.prompt_cache_dir, identity=identity, max_bytes=config.prompt_cache_bytes)
    archive = PrefixArchive(cache, folder)
    archive.load()
    return cache, archive
