"""What a template may spend on one rendering: work, text and time, counted by the code that the sandbox compiles."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import cast

from attrs import define, field, frozen

from headrace_models.errors import TemplateError

__all__ = ["NESTED", "SHORT", "SIZED", "STEP_COST", "Meter", "RenderLimits"]

# What an operation can build much of.
SIZED = (str, bytes, list, tuple, dict, range)
NESTED = (list, tuple, set, frozenset)
# A loop's turn or a call costs this much work; characters and elements cost one each.
STEP_COST = 64
# A text of at most this many characters costs no more than a step.
SHORT = 256
# Work and steps between two looks at the clock: some milliseconds at the slowest thing that a unit stands for.
_CLOCK_INTERVAL = 16_384
_CLOCK_STEPS = _CLOCK_INTERVAL // STEP_COST


@frozen(kw_only=True)
class RenderLimits:
    """Bounds of one rendering; reaching one is a `TemplateError` that names it.

    Attributes:
        max_source_chars: characters of a template's source.
        max_work: units of work: 64 for each loop turn and call, one for each character or element that is built.
        max_chars: characters of the prompt, and of any text that the template builds on the way.
        max_seconds: wall time.
    """

    max_source_chars: int = 128 * 1024
    max_work: int = 256_000_000
    max_chars: int = 16_000_000
    max_seconds: float = 2.0


@define
class Meter:
    """One rendering's account.

    Attributes:
        tick: spends one step; raises TemplateError once the work or the time is used up. It runs no Python code but
            for one call in 256, which keeps ordinary templates as fast as without a meter.
    """

    limits: RenderLimits
    clock: Callable[[], float] = time.monotonic
    tick: Callable[[], None] = field(init=False)
    _left: int = field(init=False)
    _next_look: int = field(init=False)
    _deadline: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._left = self.limits.max_work
        self._next_look = self._left - _CLOCK_INTERVAL
        self._deadline = self.clock() + self.limits.max_seconds
        self.tick = chain.from_iterable(self._steps()).__next__

    def charge(self, units: int) -> None:
        """Spend work, before it is done where it is large.

        Raises:
            TemplateError: the work or the time is used up.
        """
        self._left -= units
        if self._left < self._next_look:
            self._look()

    def check_size(self, size: int) -> None:
        """Refuse to build a text or list of more than `max_chars` characters or elements, and charge for it."""
        if size > self.limits.max_chars:
            raise TemplateError(
                f"the chat template builds a text of {size} characters, over the limit of {self.limits.max_chars} "
                f"(max_chars): shorten the conversation, or use a template that you trust"
            )
        self.charge(size)

    def sized(self, value: object) -> object:
        """Charge for what an operation has built; other values cost nothing."""
        if isinstance(value, SIZED):
            self.check_size(len(value))
        return value

    def weigh(self, value: object) -> int:
        """Return how many characters and elements a value holds, in all levels; shared ones count each time."""
        total = charged = 0
        waiting = [value]
        while waiting and total <= self.limits.max_chars:
            item = waiting.pop()
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, dict):
                waiting.extend(cast("dict[object, object]", item).keys())
                waiting.extend(cast("dict[object, object]", item).values())
            elif isinstance(item, NESTED):
                waiting.extend(cast("Iterable[object]", item))
            total += 1
            if total - charged >= _CLOCK_INTERVAL:
                self.charge(total - charged)
                charged = total
        self.check_size(total)
        return total

    def counted(self, items: Iterable[object]) -> Iterator[object]:
        """Hand items on, spending a step for each."""
        for item in items:
            self.tick()
            yield item

    def _steps(self) -> Iterator[Iterable[None]]:
        while True:
            self.charge(_CLOCK_INTERVAL)
            self._look()
            yield repeat(None, _CLOCK_STEPS)

    def _look(self) -> None:
        if self._left < 0:
            raise TemplateError(
                f"the chat template did more work than the limit of {self.limits.max_work} units (max_work): it may "
                f"loop without end; shorten the conversation, or use a template that you trust"
            )
        if self.clock() > self._deadline:
            raise TemplateError(
                f"the chat template ran longer than the time limit of {self.limits.max_seconds:g} s (max_seconds): it "
                f"may loop without end; shorten the conversation, or use a template that you trust"
            )
        self._next_look = self._left - _CLOCK_INTERVAL
