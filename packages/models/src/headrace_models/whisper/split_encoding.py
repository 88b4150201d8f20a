"""The encoder on several cores of a CPU: each thread has a share of a window's positions.

MLX runs the operations of a stream in turn, and only its products use more than one core; softmax, GELU, norms and
copies take most of a window's time, on one. So each thread carries its positions through all blocks on a stream of its
own, with a share of the BLAS's threads, and the threads meet once per block, to see all keys and values.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from threading import Barrier, BrokenBarrierError, Lock
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import field, frozen

from headrace_models.device import share_blas
from headrace_models.whisper.config import FRAMES_PER_POSITION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_models.whisper.encoder import AudioEncoder

    _Pair = tuple[mx.array, mx.array]

__all__ = ["SplitEncoder", "num_shares"]

_MOST_SHARES = 4
_FEWEST_POSITIONS = 64


def num_shares() -> int:
    """Return into how many shares a window is divided here: one per core that this process may use, at most four."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(_MOST_SHARES, num_cores)


class _Meetings:
    """Where the threads of a window give each other their keys and values, once per block."""

    def __init__(self, num_shares: int) -> None:
        self.barrier = Barrier(num_shares)
        # In turns: who writes for the block after the next has met those who read this one's.
        self._given: tuple[list[_Pair | None], ...] = ([None] * num_shares, [None] * num_shares)

    def exchange(self, block: int, share: int, own: _Pair) -> _Pair:
        """Give a share's keys and values, evaluated, and return everybody's, in order."""
        given = self._given[block % 2]
        given[share] = own
        self.barrier.wait()
        pairs = list(filter(None, given))
        keys, values = ([pair[part] for pair in pairs] for part in (0, 1))
        return mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)


@frozen(eq=False)
class _Crew:
    """Threads that are kept for as long as the process runs, because one that evaluates leaves a stream behind."""

    threads: ThreadPoolExecutor
    turn: Lock = field(factory=Lock)
    """One window at a time: shares of two, each waiting for its others, could take all threads."""


@cache
def _crew(num_shares: int) -> _Crew:
    return _Crew(ThreadPoolExecutor(num_shares, "headrace-encode"))


@frozen(eq=False)
class SplitEncoder:
    """An encoder whose windows are computed in shares, one thread for each."""

    encoder: AudioEncoder
    num_shares: int

    def __call__(self, mel: mx.array) -> mx.array:
        """Encode windows, as `AudioEncoder` does; evaluates."""
        count = mel.shape[1] // FRAMES_PER_POSITION
        if count < self.num_shares * _FEWEST_POSITIONS:
            return self.encoder(mel)
        mx.eval(mel)
        bounds = [count * share // self.num_shares for share in range(self.num_shares + 1)]
        meetings = _Meetings(self.num_shares)
        crew = _crew(self.num_shares)
        with crew.turn:
            share_blas(self.num_shares)
            try:
                shares = [
                    crew.threads.submit(self._share, mel, start, stop, index, meetings)
                    for index, (start, stop) in enumerate(pairwise(bounds))
                ]
                wait(shares)
            finally:
                share_blas(1)
        faults = [fault for share in shares if (fault := share.exception()) is not None]
        for fault in faults:
            if not isinstance(fault, BrokenBarrierError):
                raise fault
        return mx.concatenate([share.result() for share in shares], axis=1)

    def _share(self, mel: mx.array, start: int, stop: int, index: int, meetings: _Meetings) -> mx.array:
        try:
            x = self.encoder.embed(mel, start, stop)
            for number, block in enumerate(self.encoder.blocks):
                queries, keys, values = block.project(x)
                mx.eval(queries, keys, values)
                keys, values = meetings.exchange(number, index, (keys, values))
                x = block.finish(x, block.attend(queries, keys, values))
            x = self.encoder.norm(x)
            mx.eval(x)
        except BaseException:
            # The others would wait for what never comes.
            meetings.barrier.abort()
            raise
        return x

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield from self.encoder.arrays()
