"""Layers put together while later ones are read: evaluation runs ahead of building, within a bound of memory.

Reading and stacking are mostly page faults of new memory, which one thread alone serves slowly. MLX evaluates the
operations of each stream in a thread, in order, and waits in it for what other threads read.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import mlx.core as mx
from attrs import define, field

__all__ = ["Assembly", "reading_stream"]

# Three or four layers of a small model. A large one's layer is more by itself, and keeps all threads busy.
_MOST_AHEAD_BYTES = 64_000_000


@define
class Assembly:
    """Evaluates groups of arrays in order, without waiting for each."""

    on_gpu: bool
    """Whether a GPU runs the operations, whose one stream is enough."""
    _started: deque[list[mx.array]] = field(factory=deque[list[mx.array]])

    def stream(self, index: int) -> AbstractContextManager[object]:
        """Return the context in which to make the arrays of group `index`: neighbours get different threads."""
        return nullcontext() if self.on_gpu or index % 2 == 0 else mx.stream(_second_stream())

    def start(self, arrays: list[mx.array]) -> None:
        """Begin to evaluate a group, and wait for earlier ones while more than 64 MB are under way."""
        mx.async_eval(arrays)
        self._started.append(arrays)
        while len(self._started) > 1 and self._bytes_ahead() > _MOST_AHEAD_BYTES:
            mx.eval(self._started.popleft())

    def finish(self) -> None:
        """Wait for all groups; any thread may use their arrays then."""
        while self._started:
            mx.eval(self._started.popleft())

    def _bytes_ahead(self) -> int:
        return sum(array.nbytes for group in self._started for array in group)


@cache
def reading_stream() -> mx.ThreadLocalStream:
    """Return the stream to read files in: stacking what was read never delays what is read next.

    It is made once: its threads, one for each thread that loads, stay for as long as the process runs.
    """
    return mx.new_thread_local_stream(mx.cpu)


@cache
def _second_stream() -> mx.ThreadLocalStream:
    return mx.new_thread_local_stream(mx.cpu)
