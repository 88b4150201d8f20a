"""Messages on their way to the engine's thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_scheduling.grammars import CompiledGrammar
    from headrace_scheduling.messages import EngineMessage


class Inbox:
    """An unbounded queue that its one reader empties at once and can wait on without polling."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._messages: list[EngineMessage | CompiledGrammar] = []

    def put(self, message: EngineMessage | CompiledGrammar) -> None:
        """Add a message and wake the reader."""
        with self._condition:
            self._messages.append(message)
            self._condition.notify()

    def take(self, *, block: bool) -> list[EngineMessage | CompiledGrammar]:
        """Remove and return everything; with `block`, wait for at least one message."""
        # An unlocked look is safe for one reader: a message that arrives now is taken before the next step.
        if not block and not self._messages:
            return []
        with self._condition:
            while block and not self._messages:
                self._condition.wait()
            taken, self._messages = self._messages, []
            return taken
