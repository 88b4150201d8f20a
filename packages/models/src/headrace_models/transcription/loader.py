"""What a worker calls to load its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from headrace_models.dtypes import DtypeName
    from headrace_models.whisper.backend import WindowBackend
    from headrace_models.whisper.sources import WhisperSource

__all__ = ["WhisperLoader"]


@frozen(kw_only=True)
class WhisperLoader:
    """Loads a Whisper model whose files are there, so that loading it again finds and checks nothing anew.

    Attributes:
        source: from `resolve_whisper`.
        dtype: as `load_whisper` takes it.
    """

    source: WhisperSource
    dtype: DtypeName = "auto"

    def __call__(self) -> WindowBackend:
        """Load the model onto the default device.

        Raises:
            ModelError: when it cannot be loaded.
        """
        from headrace_models.whisper.backend import ModelBackend
        from headrace_models.whisper.loading import load_whisper

        return ModelBackend(load_whisper(self.source, dtype=self.dtype, download=False))
