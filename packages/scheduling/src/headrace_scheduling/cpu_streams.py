"""Streams of a CPU, among which the prompts of a step are dealt."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_scheduling.packs import split_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace_scheduling.packs import Part


class CpuStreams:
    """Runs forwards of a step at the same time.

    MLX runs the operations of one CPU stream in turn on one thread; only products of matrices use more. On several
    streams, with a share of the BLAS's threads each, everything else of a prompt runs on several cores too.

    Args:
        num_streams: how many; 1, or any other device than a CPU, leaves everything on the default stream.
        share_blas: divides the threads of the BLAS among so many streams.
    """

    def __init__(self, num_streams: int = 1, share_blas: Callable[[int], None] | None = None) -> None:
        is_cpu = mx.default_device() == mx.Device(mx.cpu)
        others = [mx.new_stream(mx.cpu) for _ in range(num_streams - 1)] if is_cpu else []
        self._streams = [mx.default_stream(mx.default_device()), *others]
        self._share_blas = share_blas
        self._num_sharing = 1

    def deal(self, packs: Sequence[Sequence[Part]]) -> Iterator[list[Part]]:
        """Yield forwards that do the packs' work, in an order that keeps every row's; build each before the next."""
        streams = cycle(self._streams)
        for pack in packs:
            for share in split_pack(pack, len(self._streams)):
                with mx.stream(next(streams)):
                    yield share

    def prepare(self, *, has_prompts: bool) -> None:
        """Divide the BLAS as the next step wants it: all of it for rows that decode, on one stream."""
        num_sharing = len(self._streams) if has_prompts else 1
        if self._share_blas is not None and num_sharing != self._num_sharing:
            self._share_blas(num_sharing)
            self._num_sharing = num_sharing
