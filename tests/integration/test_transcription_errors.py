"""The HTTP error table against the errors of transcription, which only this place may see together."""

import pytest

import headrace_models.audio.errors as audio_errors
import headrace_models.transcription.errors as transcription_errors
import headrace_models.whisper.errors as whisper_errors
from headrace_http_api.error_table import ERROR_RULES, INTERNAL, rule_of
from headrace_models.errors import ModelError

EVERY = {
    cls.__name__: cls
    for module in (audio_errors, transcription_errors, whisper_errors)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, ModelError) and cls is not ModelError
}


def test_rules_are_for_errors_that_exist():
    """No rule of the table is for a class that is not there."""
    named = {name.removeprefix("headrace_models.") for name in ERROR_RULES if name.startswith("headrace_models.")}

    assert named <= EVERY.keys()


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_error_has_an_answer(name):
    """Each one has a rule, its own or its base's; only the base of the service's own errors is a fault unforeseen."""
    rule = rule_of(EVERY[name]("message"))

    assert (rule is INTERNAL) == (name == "TranscriptionError")
