"""What audio may take. Apart from reading it, because those who only pass limits on need no numpy."""

from attrs import frozen

__all__ = ["AudioLimits"]


@frozen(kw_only=True)
class AudioLimits:
    """What audio may take."""

    max_bytes: int = 200 * 2**20
    """Of the file."""
    max_duration_s: float = 4 * 3600.0
    max_decode_s: float = 120.0
    """Time that decoding may take."""
