"""The transcription service of the models is what the audio routes ask for: names, arguments, results and errors."""

import asyncio
import inspect

import attrs
import pytest

from headrace_http_api.audio_ports import SpeechFilter, Transcriber, TranscriptionOptions
from headrace_http_api.error_table import INTERNAL, rule_of
from headrace_models.audio import errors as audio_errors
from headrace_models.transcription import TranscriptionService
from headrace_models.transcription import errors as service_errors
from headrace_models.transcription.requested import to_options, to_speech
from headrace_models.whisper import TranscribeOptions
from headrace_models.whisper import errors as option_errors


def test_the_service_has_every_method_of_the_protocol():
    """Of the same kind, and with no argument that the routes do not give."""
    for name, wanted in inspect.getmembers(Transcriber):
        if name.startswith("_"):
            continue
        found = getattr(TranscriptionService, name)
        assert inspect.iscoroutinefunction(found) == inspect.iscoroutinefunction(wanted)
        if callable(wanted):
            needed = [one for one in inspect.signature(found).parameters.values() if one.default is one.empty]
            assert len(needed) <= len(inspect.signature(wanted).parameters)


def test_options_arrive_whole():
    """Each field of the routes' options reaches the model's, and the defaults are the same."""
    assert to_options(TranscriptionOptions()) == TranscribeOptions()
    changed = TranscriptionOptions(
        task="translate",
        language="de",
        prompt="Names.",
        vocabulary=("Isar",),
        temperature=(0.0, 0.4),
        beam_size=3,
        condition_on_previous_text=False,
        no_speech_threshold=0.7,
        word_timestamps=True,
        repetition_guard=False,
        audio_context=700,
        draft=(50363, 11, 12),
        open_end=True,
        speech=SpeechFilter(threshold=0.4, min_speech_s=0.5, is_trimming=True),
    )
    arrived = to_options(changed)
    for name in attrs.fields_dict(TranscriptionOptions):
        if name == "speech":
            assert attrs.asdict(to_speech(changed.speech)) == attrs.asdict(changed.speech)
        else:
            assert getattr(arrived, name) == getattr(changed, name), name


@pytest.mark.parametrize("module", [audio_errors, option_errors, service_errors])
def test_every_error_has_a_rule(module):
    """None of them is told as a fault of the server that nobody expected."""
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isclass(found) and issubclass(found, Exception) and found is not service_errors.TranscriptionError:
            assert rule_of(found("x")) is not INTERNAL, name


async def test_a_hold_is_a_context():
    """And the statistics have what the routes tell."""
    service = TranscriptionService(lambda: None, model_id="m", transport="thread")
    with service.hold():
        stats = service.stats()
    from headrace_http_api.audio_ports import TranscriberStats

    wanted = [name for name, one in inspect.getmembers(TranscriberStats) if isinstance(one, property)]
    assert all(hasattr(stats, name) for name in wanted)
    await asyncio.wait_for(service.close(), 5)
