"""The asyncio side of an engine: places requests, counts what is outstanding, hands out streams."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_scheduling.errors import EngineFailed, EngineUnavailable, GatewayClosed, QueueFull, RequestRefused
from headrace_scheduling.messages import (
    Cancel,
    Drain,
    EngineInfo,
    EngineStatus,
    Exclusive,
    OperationResult,
    Prepare,
    StepEvents,
    Submit,
)
from headrace_scheduling.placement import place
from headrace_scheduling.stream import GenerationStream

if TYPE_CHECKING:
    from headrace_scheduling.ports import EnginePort
    from headrace_scheduling.requests import GenerationPlacement, GenerationRequest, RequestShape
    from headrace_scheduling.trace import PromptResponseTrace

_SETTLED = frozenset({"ready", "failed", "stopped"})


@frozen(kw_only=True)
class GatewayStats:
    """The gateway and its engine now.

    Attributes:
        num_outstanding: generations that have not ended.
        closed: the gateway drains or is closed.
        status: the engine's last published status.
        info: facts of the engine; None until it is first ready.
        accepting: a request sent now would be admitted.
    """

    num_outstanding: int
    max_outstanding: int
    closed: bool
    status: EngineStatus
    info: EngineInfo | None
    accepting: bool


class GenerationGateway:
    """The one way from an event loop to an engine. All methods are called on the loop that called `start`.

    Args:
        port: not yet started; the gateway owns it from here on.
        max_outstanding: most generations that run or wait at once.
    """

    def __init__(self, port: EnginePort, *, max_outstanding: int = 64) -> None:
        if max_outstanding < 1:
            raise ValueError(f"max_outstanding is {max_outstanding!r}; it must be at least 1")
        self._port = port
        self._max_outstanding = max_outstanding
        self._streams: dict[int, GenerationStream] = {}
        self._operations: dict[int, asyncio.Future[object]] = {}
        self._ids = itertools.count(1)
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._changed: asyncio.Event = asyncio.Event()

    async def start(self) -> None:
        """Start the engine; returns at once while it loads."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._port.start(self._on_events, loop=self._loop)

    async def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            EngineUnavailable: it failed, stopped, or was not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._port.status.state not in _SETTLED:
                    await self._wait_change()
        except TimeoutError:
            raise EngineUnavailable(f"the engine is not ready after {timeout_s!r} s: it is loading") from None
        return self._require_ready()

    def place(self, shape: RequestShape) -> GenerationPlacement:
        """Decide how a request would run.

        Raises:
            GatewayClosed: nothing is admitted any more.
            EngineUnavailable: the engine is loading, restarting or failed.
            ContextOverBudget: the prompt is at or above the context.
            RequestRefused: the prompt is empty.
        """
        self._require_open()
        return place(self._require_ready(), shape, issuer=self)

    async def run(
        self,
        placement: GenerationPlacement,
        request: GenerationRequest,
        *,
        trace: PromptResponseTrace | None = None,
    ) -> GenerationStream:
        """Submit a placed request; its stream must be iterated to the end or closed.

        Raises:
            GatewayClosed: nothing is admitted any more.
            QueueFull: too many generations are outstanding.
            EngineUnavailable: the engine cannot take it now.
            RequestRefused: the placement was made by another gateway, or for another request.
        """
        self._require_open()
        if placement.issuer is not self:
            raise RequestRefused("the placement was made by another gateway; place the request here")
        shape = placement.shape
        asked, placed = (
            (len(request.prompt_ids), request.options.num_choices),
            (shape.num_prompt_tokens, shape.num_choices),
        )
        if asked != placed:
            raise RequestRefused(
                f"the request has {asked[0]} prompt tokens and {asked[1]} choices, its placement {placed[0]} and "
                f"{placed[1]}; place it again"
            )
        if len(self._streams) >= self._max_outstanding:
            raise QueueFull(f"{self._max_outstanding} requests are outstanding, which is the limit; try again later")
        request_id = next(self._ids)
        is_serial = placement.mechanism == "serial"
        self._port.send(
            Submit(request_id=request_id, request=request, max_tokens=placement.max_tokens, serial=is_serial)
        )
        num_choices = request.options.num_choices
        stream = GenerationStream(request_id, self._cancel, trace, num_choices=num_choices)
        self._streams[request_id] = stream
        return stream

    async def run_exclusive(self, operation: object) -> object:
        """Run a named operation while no row runs, and return its value.

        Raises:
            GatewayClosed: nothing is admitted any more.
            EngineUnavailable: the engine cannot take it now.
            EngineFailed: the operation failed, or the engine did.
        """
        self._require_open()
        operation_id = next(self._ids)
        self._port.send(Exclusive(operation_id, operation))
        return await self._outcome(operation_id)

    async def run_preparation(self, operation: object) -> object:
        """Run a named operation between two steps, and return its value. Raises as `run_exclusive`."""
        self._require_open()
        operation_id = next(self._ids)
        self._port.send(Prepare(operation_id, operation))
        return await self._outcome(operation_id)

    def stats(self) -> GatewayStats:
        """Return the gateway's counts with the last published status, also during prefill and while loading."""
        status = self._port.status
        num_outstanding = len(self._streams)
        return GatewayStats(
            num_outstanding=num_outstanding,
            max_outstanding=self._max_outstanding,
            closed=self._is_closed,
            status=status,
            info=self._port.info,
            accepting=not self._is_closed and status.state == "ready" and num_outstanding < self._max_outstanding,
        )

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Admit nothing more and wait until everything outstanding has ended; False if it took too long."""
        self._is_closed = True
        self._port.send(Drain())
        try:
            async with asyncio.timeout(timeout_s):
                while self._streams or self._operations:
                    await self._wait_change()
        except TimeoutError:
            return False
        return True

    async def close(self, timeout_s: float | None = None) -> None:
        """Stop the engine; what is outstanding ends as cancelled. Idempotent.

        Args:
            timeout_s: after which the engine is ended as it stands; None takes `EngineConfig.stop_timeout_s`.
        """
        self._is_closed = True
        # The port joins threads or processes; the loop stays free to take the last events.
        await asyncio.to_thread(self._port.close, timeout_s)

    # ---- on the engine port's thread, or on the loop ---------------------------------------------------------

    def _on_events(self, events: StepEvents) -> None:
        if threading.get_ident() == self._thread_id:
            self._deliver(events)
            return
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._deliver, events)
        except RuntimeError:
            # The loop closed between the check and the call; nobody is left to tell.
            return

    # ---- on the loop -----------------------------------------------------------------------------------------

    def _deliver(self, events: StepEvents) -> None:
        for row in events.rows:
            stream = self._streams.get(row.request_id)
            if stream is not None:
                stream.feed(row)
                if stream.is_ended:
                    del self._streams[row.request_id]
        for result in events.operations:
            self._settle(result)
        if not self._changed.is_set():
            self._changed.set()

    def _settle(self, result: OperationResult) -> None:
        future = self._operations.pop(result.operation_id, None)
        if future is None or future.done():
            return
        if result.error is None:
            future.set_result(result.value)
        else:
            future.set_exception(EngineFailed(result.error))

    async def _outcome(self, operation_id: int) -> object:
        future = self._operations[operation_id] = asyncio.get_running_loop().create_future()
        return await future

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _cancel(self, request_id: int) -> None:
        self._port.send(Cancel(request_id))

    def _require_open(self) -> None:
        if self._is_closed:
            raise GatewayClosed("the gateway drains or is closed; send the request to another server")

    def _require_ready(self) -> EngineInfo:
        status, info = self._port.status, self._port.info
        if info is None or status.state != "ready":
            raise status.refusal()
        return info
