"""Grammars that are compiled on a worker thread of the engine, while rows of other requests run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from logging import getLogger
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_scheduling.faults import log_fault, summarize

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_sampling import GrammarState
    from headrace_scheduling.messages import Submit
    from headrace_scheduling.ports import GrammarCompiler, LoadedModel

_logger = getLogger(__name__)


@frozen
class CompiledGrammar:
    """A request whose grammar is ready: one state per choice, or why there is none. Never leaves the engine."""

    submit: Submit
    states: tuple[GrammarState, ...] = ()
    error: str | None = None


class GrammarQueue:
    """Compiles the grammars of requests, one after the other.

    Args:
        compile_grammar: makes a state for one row; called on the worker thread.
        deliver: takes each outcome; called on the worker thread.
    """

    def __init__(
        self,
        compile_grammar: GrammarCompiler,
        loaded: LoadedModel,
        deliver: Callable[[CompiledGrammar], None],
    ) -> None:
        self._compile = compile_grammar
        self._loaded = loaded
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(1, "headrace-grammar")

    def start(self, submit: Submit) -> None:
        """Compile a request's grammar; return at once."""
        self._pool.submit(self._run, submit)

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, submit: Submit) -> None:
        grammar = submit.request.grammar
        try:
            states = tuple(self._compile(self._loaded, grammar) for _ in range(submit.request.options.num_choices))
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything; only its request ends
            log_fault(_logger, f"the grammar of request {submit.request_id} could not be compiled", error)
            self._deliver(CompiledGrammar(submit, error=summarize(error)))
        else:
            self._deliver(CompiledGrammar(submit, states))
