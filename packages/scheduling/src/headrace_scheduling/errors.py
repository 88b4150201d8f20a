"""Errors of the scheduling package.

SchedulingError(Exception)
├── GatewayClosed        server: draining or stopped; the caller may try another server
├── QueueFull            caller: too much outstanding; try again later
├── EngineUnavailable    server: the engine is loading or restarting; try again later
│   └── EngineGone       server: it failed for good or was stopped; trying again does not help
├── EngineFailed         server: the engine died or a forward step raised while this request ran
├── ContextOverBudget    caller: the prompt can never fit (ValueError)
├── DeadlineExceeded     caller: the request's own time was over before it ended
├── RequestRefused       caller: the engine cannot serve this request as asked (ValueError)
└── GenerationCancelled  caller: the stream was closed or the task cancelled
"""


class SchedulingError(Exception):
    """Base of every error that this package raises on purpose."""


class GatewayClosed(SchedulingError):
    """The gateway drains or is closed and admits nothing more."""


class QueueFull(SchedulingError):
    """Too much is outstanding or waiting; the same request may be sent again later."""


class EngineUnavailable(SchedulingError):
    """The engine is still loading, or restarting after a failure."""


class EngineGone(EngineUnavailable):
    """The engine failed for good, or was stopped: somebody has to start the server again."""


class EngineFailed(SchedulingError):
    """The engine failed while the request was running; nothing of it was stored."""


class ContextOverBudget(SchedulingError, ValueError):
    """The prompt is at or above the context that the engine can serve."""

    def __init__(self, num_prompt_tokens: int, max_context: int) -> None:
        # Clients of several vendors tell this error by its first words, and shorten the conversation.
        super().__init__(
            f"this model's maximum context length is {max_context} tokens here, and the prompt has "
            f"{num_prompt_tokens}; at least one must be left for the reply: shorten the prompt"
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_context = max_context


class DeadlineExceeded(SchedulingError):
    """The request's own time limit passed before it ended."""


class RequestRefused(SchedulingError, ValueError):
    """The request asks for something that this engine cannot do."""


class GenerationCancelled(SchedulingError):
    """The generation ended because its stream was closed."""
