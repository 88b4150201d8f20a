"""Where a request's time goes, for whoever wants to record it."""

from typing import Literal, Protocol

TracePhase = Literal["submitted", "admitted", "first_delta", "ended"]


class PromptResponseTrace(Protocol):
    """Called on the event loop's thread as a request passes each phase, at most once per phase and in order."""

    def mark(self, phase: TracePhase) -> None: ...
