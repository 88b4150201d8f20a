"""The protocols of transcription."""

import pytest

from headrace_http_api.audio_ports import Pcm, TranscriptionOptions


async def test_fake_service_plays_its_script(transcriber):
    """The first progress says that the take was accepted; then each segment comes once, then the transcript."""
    take = await transcriber.submit(b"RIFF" + b"\0\0\0\0" * 32_000, TranscriptionOptions())

    seen = [progress async for progress in take]

    assert [progress.position_s for progress in seen] == [0.0, 1.0, 2.0]
    assert take.transcript.text == "Hello there. Bye."
    assert [one for progress in seen for one in progress.segments] == list(take.transcript.segments)
    assert take.transcript.duration_s == 2.0


def test_audio_and_prompts_are_not_shown():
    """Representations end up in logs; what somebody says must not."""
    options = TranscriptionOptions(prompt="secret", vocabulary=("secret",))

    assert "secret" not in repr(options)
    assert repr(Pcm(b"\0\0\0\0")) == "Pcm()"


@pytest.mark.parametrize("num_samples", [0, 1, 16_000])
def test_duration_of_samples(num_samples):
    """Four bytes are one sample of 1/16000 s."""
    assert Pcm(b"\0\0\0\0" * num_samples).duration_s == num_samples / 16_000
