"""The frame that turns steps into a parser with push and flush."""

from headrace_http_api.parsing.outbox import Outbox
from headrace_http_api.parsing.parts import Part
from headrace_http_api.parsing.reader import Reader, Steps

__all__ = ["SteppingParser"]


class SteppingParser:
    """Runs one generator over the pushed text; a subclass writes it as `_steps`.

    Attributes:
        _reader: the text.
        _outbox: what the steps found.
    """

    def __init__(self) -> None:
        self._reader = Reader()
        self._outbox = Outbox()
        self._running = self._steps()

    def push(self, text: str) -> list[Part]:
        """See `OutputParser.push`."""
        self._reader.feed(text)
        next(self._running)
        return self._outbox.take()

    def flush(self) -> list[Part]:
        """See `OutputParser.flush`."""
        self._reader.has_ended = True
        next(self._running, None)
        return self._outbox.take()

    def _steps(self) -> Steps[None]:
        raise NotImplementedError
