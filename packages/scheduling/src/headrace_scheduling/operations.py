"""Operations that the engine runs for others: exclusive ones while no row runs, preparations between steps."""

from __future__ import annotations

from collections import deque
from logging import getLogger
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_scheduling.faults import log_fault, summarize
from headrace_scheduling.messages import Exclusive, OperationResult, Prepare

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_scheduling.config import OperationHandler
    from headrace_scheduling.ports import LoadedModel

_logger = getLogger(__name__)


@frozen
class EncodeTexts:
    """A preparation: encode texts with the loaded codec. Its value is one tuple of token ids per text."""

    texts: tuple[str, ...]


def encode_texts(loaded: LoadedModel, operation: EncodeTexts) -> tuple[tuple[int, ...], ...]:
    """Handle `EncodeTexts`."""
    return tuple(tuple(loaded.codec.encode(text)) for text in operation.texts)


class OperationQueue:
    """Operations that have not run yet, in order of arrival, and the results to publish."""

    def __init__(self, loaded: LoadedModel, handlers: Mapping[type, OperationHandler]) -> None:
        self._loaded = loaded
        self._handlers = handlers
        self._exclusive: deque[Exclusive] = deque()
        self._prepare: deque[Prepare] = deque()
        self._results: list[OperationResult] = []

    @property
    def has_exclusive(self) -> bool:
        return bool(self._exclusive)

    @property
    def has_any(self) -> bool:
        return bool(self._exclusive or self._prepare)

    def add(self, message: Exclusive | Prepare) -> None:
        """Queue an operation."""
        if isinstance(message, Exclusive):
            self._exclusive.append(message)
        else:
            self._prepare.append(message)

    def run_one_preparation(self) -> None:
        """Run the oldest preparation, if any: one between two steps, so that a burst of them cannot stall rows."""
        if self._prepare:
            self._run(self._prepare.popleft())

    def run_exclusive(self) -> None:
        """Run every exclusive operation that waits. The caller has made sure that no row runs."""
        while self._exclusive:
            self._run(self._exclusive.popleft())

    def refuse_all(self, reason: str) -> None:
        """Give every operation that waits `reason` as its error."""
        for message in (*self._exclusive, *self._prepare):
            self._results.append(OperationResult(operation_id=message.operation_id, error=reason))
        self._exclusive.clear()
        self._prepare.clear()

    def drain_results(self) -> tuple[OperationResult, ...]:
        """Return and forget the results since the last call."""
        results = tuple(self._results)
        self._results.clear()
        return results

    def _run(self, message: Exclusive | Prepare) -> None:
        operation = message.operation
        handler = self._handlers.get(type(operation))
        if handler is None:
            error = f"no handler is registered for {type(operation).__name__!r} operations"
            self._results.append(OperationResult(operation_id=message.operation_id, error=error))
            return
        try:
            value = handler(self._loaded, operation)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; it becomes the operation's error
            log_fault(_logger, f"operation {type(operation).__name__} failed", error)
            self._results.append(OperationResult(operation_id=message.operation_id, error=summarize(error)))
        else:
            self._results.append(OperationResult(operation_id=message.operation_id, value=value))
