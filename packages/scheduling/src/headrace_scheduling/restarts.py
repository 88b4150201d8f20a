"""How often a dead engine is started again."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class RestartPolicy:
    """Allows at most `max_restarts` within any `window_s` seconds, so that a crash loop ends."""

    def __init__(
        self, *, max_restarts: int = 3, window_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._clock = clock
        self._times: deque[float] = deque()
        self.num_restarts = 0

    def allow(self) -> bool:
        """Count a restart if it is allowed now."""
        now = self._clock()
        while self._times and now - self._times[0] >= self.window_s:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return False
        self._times.append(now)
        self.num_restarts += 1
        return True
