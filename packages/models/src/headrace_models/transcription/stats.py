"""What a service counts."""

from attrs import define, frozen

__all__ = ["Counts", "ServiceStats"]


@frozen(kw_only=True)
class ServiceStats:
    """Counts since the service was made, and how it is now."""

    is_resident: bool
    """Whether the model is in memory."""
    num_loads: int
    num_unloads: int
    num_requests: int
    """Takes that were submitted."""
    num_running: int
    """Takes that the model works on."""
    num_waiting: int
    """Takes that are read, or wait."""
    num_failed: int
    num_cancelled: int
    num_crashes: int
    """Workers that ended without being asked."""
    last_load_s: float | None
    idle_unload_s: float | None
    """After how long without work the model is unloaded; None if never."""


@define
class Counts:
    """The same while it is counted."""

    loads: int = 0
    unloads: int = 0
    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    crashes: int = 0
    last_load_s: float | None = None
