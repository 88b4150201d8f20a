"""What is decided about a decoded window: has it failed, is it silence (openai/whisper, `transcribe.py`)."""

from attrs import evolve

from headrace_models.whisper.decoded import DecodedWindow
from headrace_models.whisper.options import TranscribeOptions

__all__ = ["is_silent", "needs_retry", "without_loop"]


def needs_retry(window: DecodedWindow, options: TranscribeOptions) -> bool:
    """Return whether the window should be decoded again at the next temperature.

    A window that repeats itself or is improbable has failed, unless it is silence. Silence takes both: a high
    probability of no speech and a low one of the text. No-speech alone calls nothing off.
    """
    if _is_improbable(window, options) and _is_maybe_silent(window, options):
        return False
    ratio = options.compression_ratio_threshold
    is_repetitive = ratio is not None and window.compression_ratio > ratio
    return is_repetitive or _is_improbable(window, options) or window.is_looped


def is_silent(window: DecodedWindow, options: TranscribeOptions) -> bool:
    """Return whether what was decoded is to be dropped, because nothing is said."""
    threshold = options.logprob_threshold
    is_sure = threshold is not None and window.avg_logprob > threshold
    return _is_maybe_silent(window, options) and not is_sure


def without_loop(window: DecodedWindow) -> DecodedWindow:
    """Return the window with what it repeats said once."""
    return window if window.loop_start is None else evolve(window, tokens=window.tokens[: window.loop_start])


def _is_improbable(window: DecodedWindow, options: TranscribeOptions) -> bool:
    return options.logprob_threshold is not None and window.avg_logprob < options.logprob_threshold


def _is_maybe_silent(window: DecodedWindow, options: TranscribeOptions) -> bool:
    return options.no_speech_threshold is not None and window.no_speech_prob > options.no_speech_threshold
