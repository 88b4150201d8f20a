"""Transcribing: what is decided about windows, what they are told, batches of audio; by a stub and a tiny model."""

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.audio import AudioTooShort, AudioUnreadable
from headrace_models.whisper import (
    InvalidTranscribeOption,
    TranscribeOptions,
    Transcriber,
    UnknownLanguage,
    language_code,
    transcribe,
    transcribe_batch,
)
from headrace_models.whisper.caches import AudioKeys
from headrace_models.whisper.decoded import DecodedWindow, LanguageGuess
from headrace_models.whisper.prompts import fit_vocabulary
from headrace_models.whisper.spans import quiet_spans


def decoded(tokenizer, text=" hello", *, stamps=(0, 50), **facts):
    begin = tokenizer.special.timestamp_begin
    tokens = (begin + stamps[0], *tokenizer.encode(text), begin + stamps[1])
    usual = {"avg_logprob": -0.2, "no_speech_prob": 0.01, "compression_ratio": 1.0, "temperature": 0.0}
    return DecodedWindow(tokens=tokens, text=text.strip(), **(usual | facts))


@frozen(eq=False)
class StubBackend:
    """A model whose windows decode to what a function of the request says."""

    model: object
    answer: object
    requests: list

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
        self.requests.extend(requests)
        return [evolve(self.answer(request), temperature=request.temperature) for request in requests]

    def align(self, requests):
        return [[] for _ in requests]


def run(model, samples, answer, **options):
    stub = StubBackend(model, answer, [])
    transcriber = Transcriber(stub)
    transcriber.add(samples, TranscribeOptions(**options))
    events = []
    while not transcriber.is_idle:
        events += transcriber.step()
    return events[-1].result, stub.requests, events


@pytest.mark.parametrize(
    ("facts", "retries"),
    [
        ({"no_speech_prob": 0.9, "compression_ratio": 5.0, "avg_logprob": -0.2}, True),
        ({"no_speech_prob": 0.9, "compression_ratio": 5.0, "avg_logprob": -1.5}, False),
        ({"no_speech_prob": 0.1, "compression_ratio": 1.0, "avg_logprob": -1.5}, True),
        ({"no_speech_prob": 0.9, "compression_ratio": 1.0, "avg_logprob": -0.2}, False),
        ({"no_speech_prob": 0.1, "compression_ratio": 2.5, "avg_logprob": -0.2}, True),
        ({"loop_start": 3}, True),
    ],
)
def test_a_failed_window_is_tried_again(facts, retries, tiny_whisper, whisper_noise):
    """No-speech alone calls no retry off: only together with a low log-probability it means silence."""

    def answer(request):
        good = decoded(tiny_whisper.tokenizer)
        return decoded(tiny_whisper.tokenizer, **facts) if request.temperature == 0 else good

    result, requests, _ = run(tiny_whisper, whisper_noise(1), answer)
    assert [request.temperature for request in requests] == ([0.0, 0.2] if retries else [0.0])
    is_silent = facts.get("no_speech_prob", 0) > 0.6 and facts.get("avg_logprob", 0) < -1
    assert result.text == ("" if is_silent else "hello")
    assert result.num_retries == int(retries)
    assert (result.language, result.language_probability) == ("de", 0.75)


def test_all_temperatures_are_tried_in_turn(tiny_whisper, whisper_noise):
    """A window that always fails is decoded once at each temperature, beams only at 0, samples only above."""
    result, requests, _ = run(
        tiny_whisper,
        whisper_noise(1),
        lambda request: decoded(tiny_whisper.tokenizer, avg_logprob=-3.0),
        beam_size=2,
        best_of=3,
    )
    assert [request.temperature for request in requests] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert [request.beam is not None for request in requests] == [True] + [False] * 5
    assert [request.num_candidates for request in requests] == [1] + [3] * 5
    assert len({request.seed for request in requests}) == 6
    assert result.segments[0].temperature == 1.0


@pytest.mark.parametrize(
    ("facts", "is_kept"),
    [({}, True), ({"avg_logprob": -3.0}, False), ({"loop_start": 4, "compression_ratio": 3.0}, False)],
)
def test_context_is_dropped_after_a_failed_window(facts, is_kept, tiny_whisper, whisper_noise):
    """What was said conditions the next window only if its window succeeded."""
    special = tiny_whisper.tokenizer.special
    _, requests, _ = run(
        tiny_whisper,
        whisper_noise(2),
        lambda request: decoded(tiny_whisper.tokenizer, **facts),
        temperature=0.0,
        language="fr",
    )
    first, second = requests
    assert special.sot_prev not in first.initial
    assert (special.sot_prev in second.initial) == is_kept
    assert second.initial[second.sot_index] == special.sot


def test_a_loop_is_said_once(tiny_whisper, whisper_noise):
    """When nothing helps, what a window repeats is left out of its text."""
    result, _, _ = run(
        tiny_whisper,
        whisper_noise(1),
        lambda request: decoded(tiny_whisper.tokenizer, " no no no", loop_start=4),
        temperature=0.0,
    )
    assert result.text == "no"
    assert len(result.segments) == 1


def test_prompts_and_prefixes(tiny_whisper, whisper_noise):
    """The first window gets prompt and prefix; with a vocabulary every window gets the prompt, and terms with it."""
    tokenizer = tiny_whisper.tokenizer

    def answer(request):
        return decoded(tokenizer, avg_logprob=-3.0)

    _, requests, _ = run(
        tiny_whisper, whisper_noise(2), answer, prompt="Ada", prefix="So", temperature=0.0, language="en"
    )
    text = [tokenizer.decode(request.initial) for request in requests]
    assert text == [" Ada So", ""]
    result, requests, _ = run(
        tiny_whisper, whisper_noise(2), answer, vocabulary="x, yy", temperature=0.0, language="en"
    )
    assert [tokenizer.decode(request.initial) for request in requests] == [" x, yy"] * 2
    assert result.vocabulary.included == ("x", "yy")
    assert result.vocabulary.token_budget == 31


@settings(max_examples=60, deadline=None)
@given(
    terms=st.lists(st.text(alphabet="abc é", min_size=1, max_size=12).filter(str.strip), max_size=12),
    prompt=st.text(alphabet="xyz ", max_size=20),
)
def test_vocabularies_fit_whole_and_in_order(terms, prompt, tiny_whisper):
    """All that is included fits the budget in order; nothing is lost; what was left out would not have fitted then."""
    tokenizer = tiny_whisper.tokenizer
    text, use = fit_vocabulary(tokenizer, prompt, terms, 64)
    assert use.token_count == len(tokenizer.encode_context(text)) <= use.token_budget == 31
    assert sorted(use.included + use.omitted) == sorted(map(str.strip, terms))
    stripped = iter(map(str.strip, terms))
    assert all(term in stripped for term in use.included)
    assert text.endswith(", ".join(use.included))


def test_audio_in_a_batch_equals_itself_alone(tiny_whisper, whisper_noise):
    """Texts, times and words of several audios together are those of each alone, conditioned or not."""
    audios = [whisper_noise(seconds, seed) for seed, seconds in enumerate((0.9, 2.7, 0.4))]
    options = [
        TranscribeOptions(language="en", word_timestamps=True, temperature=(0.0, 0.5), max_tokens=12),
        TranscribeOptions(language="en", condition_on_previous_text=False, word_timestamps=True, max_tokens=12),
        TranscribeOptions(temperature=0.8, prompt="ab", max_tokens=12, seed=3),
    ]
    # A random model is sure of nothing, so that no window would be kept.
    options = [evolve(one, logprob_threshold=None, no_speech_threshold=None) for one in options]
    together = transcribe_batch(tiny_whisper, audios, options)
    for samples, one, found in zip(audios, options, together, strict=True):
        alone = transcribe(tiny_whisper, samples, one)
        assert found.text == alone.text
        assert [(s.start_s, s.end_s, s.tokens) for s in found.segments] == [
            (s.start_s, s.end_s, s.tokens) for s in alone.segments
        ]
        assert [(w.text, w.start_s, w.end_s) for w in found.words] == [
            (w.text, w.start_s, w.end_s) for w in alone.words
        ]
        assert found.segments
        starts = [segment.start_s for segment in found.segments]
        assert starts == sorted(starts)
        assert all(0 <= s.start_s <= s.end_s <= found.duration_s for s in found.segments)
    assert together[1].num_windows >= 3
    assert together[0].words


def test_windows_without_conditioning_decode_side_by_side(tiny_whisper, whisper_noise):
    """Unconditioned windows of one audio are one batch; segments come in order of time, the result at the end."""
    batches = []

    def answer(request):
        return decoded(tiny_whisper.tokenizer)

    stub = StubBackend(tiny_whisper, answer, [])
    transcriber = Transcriber(stub, max_rows=4)
    transcriber.add(whisper_noise(3.9), TranscribeOptions(condition_on_previous_text=False, language="en"))
    transcriber.add(whisper_noise(0.8), TranscribeOptions(language="de"))
    events = []
    while not transcriber.is_idle:
        before = len(stub.requests)
        events += transcriber.step()
        batches.append(len(stub.requests) - before)
    # Between them they are encoded.
    assert batches == [0, 4, 0, 2]
    done = {event.take_id: event.result for event in events if event.result}
    assert set(done) == {0, 1}
    streamed = [segment for event in events if event.take_id == 0 for segment in event.segments]
    assert tuple(streamed) == done[0].segments
    assert events[0].duration_s in (3.9, 0.8)


def test_canceled_audio_leaves_no_trace(tiny_whisper, whisper_noise):
    """What is canceled is decoded no more; the rest goes on."""
    stub = StubBackend(tiny_whisper, lambda request: decoded(tiny_whisper.tokenizer), [])
    transcriber = Transcriber(stub)
    first = transcriber.add(whisper_noise(3), TranscribeOptions(language="en"))
    second = transcriber.add(whisper_noise(1), TranscribeOptions(language="en"))
    transcriber.step()
    transcriber.cancel(first)
    transcriber.cancel(99)
    assert transcriber.is_idle or {event.take_id for event in transcriber.step()} == {second}


@pytest.mark.parametrize("before", [(), (0,), (0, " yes", 10, 10)])
def test_an_open_end_is_heard_once(before, tiny_whisper, whisper_noise):
    """Text that no timestamp closes is a segment to the end of the audio, with its words, and no further window."""
    begin, encode = tiny_whisper.tokenizer.special.timestamp_begin, tiny_whisper.tokenizer.encode
    pieces = [encode(piece) if isinstance(piece, str) else [begin + piece] for piece in (*before, " so")]
    tokens = tuple(token for piece in pieces for token in piece)

    def answer(request):
        return evolve(decoded(tiny_whisper.tokenizer), tokens=tokens)

    result, requests, _ = run(
        tiny_whisper, whisper_noise(0.9), answer, open_end=True, word_timestamps=True, language="en"
    )
    assert len(requests) == 1
    assert result.segments[-1].text == " so"
    assert result.segments[-1].end_s == 0.9


def test_what_is_cancelled_after_encoding_is_not_decoded(tiny_whisper, whisper_noise):
    """A step encodes or decodes, so that nobody waits for both."""
    stub = StubBackend(tiny_whisper, lambda request: decoded(tiny_whisper.tokenizer), [])
    transcriber = Transcriber(stub)
    take_id = transcriber.add(whisper_noise(1), TranscribeOptions(language="en"))
    assert (transcriber.step(), stub.requests) == ([], [])
    transcriber.cancel(take_id)
    assert (transcriber.step(), stub.requests) == ([], [])


def test_without_timestamps_there_is_still_a_segment(tiny_whisper, whisper_noise):
    """Each window is one segment, from its start to its end."""
    special, encode = tiny_whisper.tokenizer.special, tiny_whisper.tokenizer.encode

    def answer(request):
        assert request.initial[-1] == special.no_timestamps
        return evolve(decoded(tiny_whisper.tokenizer), tokens=tuple(encode(" yes")))

    result, _, _ = run(tiny_whisper, whisper_noise(1.4), answer, without_timestamps=True, language="en")
    assert [(s.start_s, s.end_s, s.text) for s in result.segments] == [(0.0, 1.0, " yes"), (1.0, 1.4, " yes")]
    assert result.text == "yes yes"


def test_translation_asks_for_english(tiny_whisper, whisper_noise):
    """Translation starts with the spoken language and the task's token."""
    special = tiny_whisper.tokenizer.special
    _, requests, _ = run(
        tiny_whisper, whisper_noise(1), lambda request: decoded(tiny_whisper.tokenizer), task="translate"
    )
    assert requests[0].initial == (special.sot, special.languages["de"], special.translate)


@settings(max_examples=80, deadline=None)
@given(seconds=st.floats(0.1, 8), window=st.integers(20, 150), seed=st.integers(0, 50))
def test_spans_cover_the_audio(seconds, window, seed):
    """Spans are adjacent, cover every frame, and none is longer than a window or, but the last, shorter than half."""
    samples = np.random.default_rng(seed).standard_normal(round(seconds * 16_000)).astype(np.float32)
    spans = quiet_spans(samples, window)
    ends = [0, *(end for _, end in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert ends[-1] == len(samples) // 160
    assert all(0 < end - start <= window for start, end in spans)
    assert all(end - start >= window // 2 for start, end in spans[:-1])


def test_spans_end_in_pauses():
    """A pause in the last quarter of a piece is where it is cut."""
    samples = np.random.default_rng(0).standard_normal(16_000 * 5).astype(np.float32)
    samples[16_000 * 21 // 10 : 16_000 * 26 // 10] = 0
    assert 225 <= quiet_spans(samples, 300)[0][1] <= 245


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": 1.5}, "temperature is 1.5"),
        ({"temperature": ()}, "temperature"),
        ({"temperature": (0.0, float("nan"))}, "temperature"),
        ({"beam_size": 17}, "1 to 16"),
        ({"beam_size": True}, "beam_size"),
        ({"beam_size": 2, "temperature": 0.5}, "beam_size is 2"),
        ({"patience": 2.0}, "patience"),
        ({"task": "summarize"}, "task is 'summarize'"),
        ({"vocabulary": ["x"] * 9000}, "8192"),
        ({"vocabulary": ["x" * 20_000]}, "16384"),
        ({"vocabulary": [""]}, "vocabulary"),
        ({"word_timestamps": True, "without_timestamps": True}, "word_timestamps"),
        ({"audio_context": 63}, "64 to 1500"),
        ({"no_speech_threshold": -0.1}, "no_speech_threshold"),
        ({"seed": -1}, "seed"),
        ({"suppress_tokens": [-1]}, "suppress_tokens"),
        ({"prompt": 3}, "prompt"),
        ({"condition_on_previous_text": "no"}, "condition_on_previous_text"),
    ],
)
def test_wrong_options_are_named(options, named):
    """An option out of range is refused with its name, value and range."""
    with pytest.raises(InvalidTranscribeOption, match=named):
        TranscribeOptions(**options)


def test_languages_have_codes_and_names():
    """Codes, names, aliases and locales lead to codes; anything else is refused."""
    assert [language_code(text) for text in ("EN", "German", "pt-BR", "mandarin", "jv")] == [
        "en",
        "de",
        "pt",
        "zh",
        "jw",
    ]
    with pytest.raises(UnknownLanguage, match="klingon"):
        TranscribeOptions(language="klingon")


def test_audio_that_cannot_be_heard_is_refused(tiny_whisper, whisper_noise):
    """Too short, not finite, stereo: an error of the audio; unknown languages and long prefixes: of the options."""
    transcriber = Transcriber.of(tiny_whisper)
    with pytest.raises(AudioTooShort, match=r"0\.050 s"):
        transcriber.add(np.zeros(800, np.float32))
    with pytest.raises(AudioUnreadable, match="finite"):
        transcriber.add(np.full(3200, np.nan, np.float32))
    with pytest.raises(AudioUnreadable, match="shape"):
        transcriber.add(np.zeros((3200, 2), np.float32))
    with pytest.raises(UnknownLanguage, match="'ja'"):
        transcriber.add(whisper_noise(1), TranscribeOptions(language="ja"))
    with pytest.raises(InvalidTranscribeOption, match="prefix"):
        transcriber.add(whisper_noise(1), TranscribeOptions(language="en", prefix="long " * 20))
    assert transcriber.is_idle
