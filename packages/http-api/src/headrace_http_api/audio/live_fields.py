"""The first message of a live session: what will be sent, and how it is transcribed."""

import sys
from array import array
from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any

import attrs
from attrs import evolve, frozen

from headrace_http_api.audio.fields import TranscriptionFields, read_fields
from headrace_http_api.audio.live import LiveOptions
from headrace_http_api.audio_ports import SAMPLE_RATE, Pcm, SpeechFilter, TranscriptionOptions
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.json_body import shown
from headrace_http_api.validation import Between, OneOf, make_converter, structure

__all__ = ["ENCODINGS", "LiveFields", "read_live_fields"]

# Bytes of one sample.
ENCODINGS: Mapping[str, int] = {"f32le": 4, "s16le": 2}

# Of a file's fields, those that a live session has no use for.
_NOT_LIVE = ("beam_size", "response_format", "stream", "timestamp_granularities", "vad_trim", "without_timestamps")


@frozen(kw_only=True)
class _OwnFields:
    """What only live sessions have."""

    encoding: Annotated[str, OneOf(tuple(ENCODINGS))] = "f32le"
    sample_rate: Annotated[int, Between(SAMPLE_RATE, SAMPLE_RATE)] = SAMPLE_RATE
    task: Annotated[str, OneOf(("transcribe", "translate"))] = "transcribe"
    interval_ms: Annotated[int, Between(200, 10_000)] = 500
    pause_ms: Annotated[int, Between(300, 10_000)] = 800


@frozen(kw_only=True)
class LiveFields:
    """A validated first message.

    Attributes:
        needs_vad: the client asked for a speech detector; if it did not say, one is used if it is there.
        rejects_vad: it wants none.
    """

    own: _OwnFields
    shared: TranscriptionFields
    needs_vad: bool
    rejects_vad: bool

    @property
    def live(self) -> LiveOptions:
        return LiveOptions(interval_s=self.own.interval_ms / 1000, pause_s=self.own.pause_ms / 1000)

    def options(self) -> TranscriptionOptions:
        """Build what the service is asked for; words always carry their times."""
        options = self.shared.options("translate" if self.own.task == "translate" else "transcribe")
        speech = None if self.rejects_vad else options.speech or SpeechFilter()
        return evolve(options, word_timestamps=True, speech=speech)

    def decode(self, data: bytes) -> Pcm:
        """Turn one message's bytes into samples.

        Raises:
            InvalidRequest: they end in the middle of a sample, or have samples that are no finite numbers.
        """
        size = ENCODINGS[self.own.encoding]
        if len(data) % size:
            raise InvalidRequest(
                f"a message has {len(data)} bytes; samples of {self.own.encoding} have {size} each",
                code="invalid_audio",
            )
        if size == 2:
            return Pcm(_from_s16(data))
        if not _are_finite(data):
            raise InvalidRequest(
                "a message has samples that are no finite numbers; send each as one between -1 and 1",
                code="invalid_audio",
            )
        return Pcm(data)


def read_live_fields(message: Mapping[str, Any]) -> LiveFields:
    """Validate the first message.

    Raises:
        InvalidRequest: for the first field at fault; `param` is its path.
    """
    for name in _NOT_LIVE:
        if message.get(name) is not None:
            raise InvalidRequest(f"{name} is {shown(message[name])}; a live session has no such choice", param=name)
    own_names = {one.name for one in attrs.fields(_OwnFields)}
    own = structure(_CONVERTER, {name: message[name] for name in own_names & message.keys()}, _OwnFields)
    rest = {name: value for name, value in message.items() if name not in own_names and name != "type"}
    shared = read_fields(rest)
    return LiveFields(own=own, shared=shared, needs_vad=shared.vad, rejects_vad=message.get("vad") is False)


def _are_finite(data: bytes) -> bool:
    samples = array("f", data)
    if sys.byteorder == "big":
        samples.byteswap()
    # A sum of doubles is finite if and only if all of so few floats are.
    return isfinite(sum(samples))


def _from_s16(data: bytes) -> bytes:
    whole = array("h", data)
    if sys.byteorder == "big":
        whole.byteswap()
    samples = array("f", [value / 32768 for value in whole])
    if sys.byteorder == "big":
        samples.byteswap()
    return samples.tobytes()


_CONVERTER = make_converter()
