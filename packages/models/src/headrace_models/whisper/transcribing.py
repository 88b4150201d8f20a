"""Transcribes audio: windows of all audio that is there, and of one audio side by side where it allows, as batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field, frozen

from headrace_models.audio.errors import AudioTooShort, AudioUnreadable
from headrace_models.whisper.alignment import AlignRequest
from headrace_models.whisper.backend import ModelBackend
from headrace_models.whisper.config import FRAMES_PER_POSITION
from headrace_models.whisper.decoded import DecodeRequest
from headrace_models.whisper.errors import InvalidTranscribeOption, UnknownLanguage
from headrace_models.whisper.fallback import needs_retry
from headrace_models.whisper.mel import FRAMES_PER_SECOND, SAMPLE_RATE, log_mel
from headrace_models.whisper.options import TranscribeOptions
from headrace_models.whisper.prompts import fit_vocabulary
from headrace_models.whisper.rules import TokenRules
from headrace_models.whisper.seeds import mix
from headrace_models.whisper.spans import quiet_spans
from headrace_models.whisper.takes import Span, Take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from headrace_models.whisper.backend import WindowBackend
    from headrace_models.whisper.model import WhisperModel
    from headrace_models.whisper.results import Segment, Transcription
    from headrace_models.whisper.takes import Accepted, Window

__all__ = ["DEFAULT_MAX_ROWS", "MIN_DURATION_S", "TakeEvent", "Transcriber", "transcribe", "transcribe_batch"]

MIN_DURATION_S = 0.1
DEFAULT_MAX_ROWS = 8


@frozen(kw_only=True)
class TakeEvent:
    """What a step gave an audio."""

    take_id: int
    segments: tuple[Segment, ...]
    """New ones, final and in order of time."""
    position_s: float
    duration_s: float
    result: Transcription | None = None
    """The whole transcript, once it is done."""


@define(eq=False)
class Transcriber:
    """Transcribes many audios at once, step by step; audio may be added at any time. For one thread.

    Attributes:
        backend: the model.
        max_rows: windows that are decoded as one batch.
    """

    backend: WindowBackend
    max_rows: int = field(default=DEFAULT_MAX_ROWS)
    _takes: dict[int, Take] = field(factory=dict[int, Take])
    _windows: list[Window] = field(factory=list["Window"])
    _num_added: int = 0

    @classmethod
    def of(cls, model: WhisperModel, *, max_rows: int = DEFAULT_MAX_ROWS) -> Transcriber:
        """Make one of a model."""
        if max_rows < 1:
            raise InvalidTranscribeOption(f"max_rows is {max_rows}; give at least 1.")
        return cls(ModelBackend(model), max_rows)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._takes

    def add(self, samples: NDArray[np.float32], options: TranscribeOptions | None = None) -> int:
        """Take audio in; its first windows are decoded by the next step.

        Args:
            samples: `(N,)` float32, 16 kHz mono, about -1 to 1.

        Returns:
            The id that events carry.

        Raises:
            AudioTooShort: less than a tenth of a second.
            AudioUnreadable: samples are not finite, or no single channel.
            InvalidTranscribeOption: the model cannot do what the options say.
        """
        take_id = self._num_added
        self._takes[take_id] = _make_take(self.backend, take_id, _checked(samples), options or TranscribeOptions())
        self._num_added += 1
        return take_id

    def cancel(self, take_id: int) -> None:
        """Drop an audio; unknown and finished ones are passed over."""
        self._takes.pop(take_id, None)
        self._windows = [window for window in self._windows if window.take.take_id != take_id]

    def step(self) -> list[TakeEvent]:
        """Encode the windows that come next, or else decode one batch of windows: what is cancelled waits for no more.

        Returns:
            What is new of every audio that got something or is done.
        """
        self._learn_languages()
        self._take_windows()
        waiting = [window for window in self._windows if window.audio is None]
        if waiting:
            self._encode(waiting)
            return []
        accepted: list[Accepted] = []
        batch = self._next_batch()
        if batch:
            decoded = self.backend.decode([self._request(window) for window in batch])
            for window, result in zip(batch, decoded, strict=True):
                options = window.take.options
                if needs_retry(result, options) and window.attempt + 1 < len(options.temperature):
                    window.attempt += 1
                    continue
                self._windows.remove(window)
                accepted.append(window.take.accept(window, result))
        self._finish(accepted)
        return list(self._events({one.window.take.take_id for one in accepted}))

    def _learn_languages(self) -> None:
        """Encode the first window of audio whose language is not known, and tell it."""
        known = {window.take.take_id for window in self._windows}
        takes = [take for take in self._takes.values() if not take.knows_language and take.take_id not in known]
        windows = [take.next_window(take.spans[0]) for take in takes[: self.max_rows]]
        self._encode(windows)
        by_length: dict[int, list[Window]] = {}
        for window in windows:
            by_length.setdefault(window.take.window_frames, []).append(window)
        for group in by_length.values():
            guesses = self.backend.detect([window.audio for window in group if window.audio is not None])
            for window, guess in zip(group, guesses, strict=True):
                window.take.learn_language(guess)
        self._windows += windows

    def _take_windows(self) -> None:
        """Fill a batch: windows under way first, then of each audio in turn."""
        if len(self._windows) < self.max_rows:
            self._windows += self._new_windows(self.max_rows - len(self._windows))

    def _next_batch(self) -> list[Window]:
        """Return windows that may decode together, all of them encoded."""
        if not self._windows:
            return []
        key = self._request(self._windows[0]).batch_key
        return [window for window in self._windows if self._request(window).batch_key == key][: self.max_rows]

    def _new_windows(self, count: int) -> list[Window]:
        busy = {id(window.span) for window in self._windows}
        waiting = [
            [take.next_window(span) for span in take.spans if not span.is_done and id(span) not in busy]
            for take in self._takes.values()
            if take.knows_language
        ]
        # A long audio shall not keep the others waiting.
        deepest = max(map(len, waiting), default=0)
        in_turn = [windows[place] for place in range(deepest) for windows in waiting if place < len(windows)]
        return in_turn[:count]

    def _encode(self, windows: Sequence[Window]) -> None:
        by_length: dict[int, list[Window]] = {}
        for window in windows:
            by_length.setdefault(window.take.window_frames, []).append(window)
        for length, group in by_length.items():
            encoded = self.backend.encode([_padded(window, length) for window in group])
            for window, audio in zip(group, encoded, strict=True):
                window.audio = audio

    def _request(self, window: Window) -> DecodeRequest:
        take, options = window.take, window.take.options
        opening, is_cold = take.open(window), window.temperature == 0
        assert window.audio is not None
        return DecodeRequest(
            audio=window.audio,
            initial=opening.tokens,
            sot_index=opening.sot_index,
            rules=take.rules,
            temperature=window.temperature,
            beam=options.beam if is_cold else None,
            num_candidates=1 if is_cold else options.best_of or 1,
            length_penalty=options.length_penalty,
            max_tokens=options.max_tokens,
            seed=mix(options.seed, window.seek, window.attempt),
            guard=options.repetition_guard,
            draft=options.draft if is_cold and window.seek == 0 else (),
        )

    def _finish(self, accepted: Sequence[Accepted]) -> None:
        timed = [one for one in accepted if one.window.take.options.word_timestamps and one.segments]
        words: dict[int, list[object]] = {}
        by_length: dict[int, list[Accepted]] = {}
        for one in timed:
            by_length.setdefault(one.window.take.window_frames, []).append(one)
        for group in by_length.values():
            found = self.backend.align([_align_request(one) for one in group])
            words.update({id(one): list(timed_words) for one, timed_words in zip(group, found, strict=True)})
        for one in accepted:
            one.window.take.finish(one, words.get(id(one)))  # pyright: ignore[reportArgumentType]

    def _events(self, changed: set[int]) -> Iterator[TakeEvent]:
        for take_id, take in list(self._takes.items()):
            if take_id not in changed and not take.is_done:
                continue
            segments = tuple(take.emit())
            result = take.result() if take.is_done else None
            yield TakeEvent(
                take_id=take_id,
                segments=segments,
                position_s=take.position_s,
                duration_s=take.duration_s,
                result=result,
            )
            if result is not None:
                del self._takes[take_id]


def transcribe(
    model: WhisperModel,
    samples: NDArray[np.float32],
    options: TranscribeOptions | None = None,
    *,
    max_rows: int = DEFAULT_MAX_ROWS,
    on_event: Callable[[TakeEvent], None] | None = None,
) -> Transcription:
    """Transcribe one audio.

    Args:
        model: from `load_whisper`.
        samples: `(N,)` float32, 16 kHz mono, about -1 to 1, as `read_audio` gives them.
        options: None means the defaults.
        max_rows: windows that are decoded as one batch, where the options allow it.
        on_event: called after each batch; raising ends the transcription.

    Raises:
        AudioTooShort: less than a tenth of a second.
        AudioUnreadable: samples are not finite, or no single channel.
        InvalidTranscribeOption: the model cannot do what the options say.
    """
    (result,) = transcribe_batch(model, [samples], options, max_rows=max_rows, on_event=on_event)
    return result


def transcribe_batch(
    model: WhisperModel,
    audios: Sequence[NDArray[np.float32]],
    options: TranscribeOptions | Sequence[TranscribeOptions] | None = None,
    *,
    max_rows: int = DEFAULT_MAX_ROWS,
    on_event: Callable[[TakeEvent], None] | None = None,
) -> list[Transcription]:
    """Transcribe several audios, whose windows decode as one batch.

    Args:
        audios: as `transcribe` takes one.
        options: for all, or for each.

    Returns:
        Transcripts in the order of `audios`; `TakeEvent.take_id` is the place in it.

    Raises:
        As `transcribe`.
    """
    wanted = [options] * len(audios) if isinstance(options, TranscribeOptions) or options is None else list(options)
    if len(wanted) != len(audios):
        raise InvalidTranscribeOption(f"there are {len(wanted)} options for {len(audios)} audios: give one for each.")
    transcriber = Transcriber.of(model, max_rows=max_rows)
    for samples, one in zip(audios, wanted, strict=True):
        transcriber.add(samples, one)
    results: dict[int, Transcription] = {}
    while not transcriber.is_idle:
        for event in transcriber.step():
            if event.result is not None:
                results[event.take_id] = event.result
            if on_event is not None:
                on_event(event)
    return [results[take_id] for take_id in range(len(audios))]


def _checked(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    samples = np.asarray(samples, np.float32)
    if samples.ndim != 1:
        raise AudioUnreadable(
            f"the samples have shape {samples.shape}; one channel (N,) at 16 kHz is expected: mix it down."
        )
    if len(samples) < MIN_DURATION_S * SAMPLE_RATE:
        raise AudioTooShort(
            f"the audio lasts {len(samples) / SAMPLE_RATE:.3f} s; at least {MIN_DURATION_S} s can be transcribed."
        )
    if not np.isfinite(samples).all():
        raise AudioUnreadable("the audio has samples that are no finite numbers: decode it again.")
    return samples


def _make_take(backend: WindowBackend, take_id: int, samples: NDArray[np.float32], options: TranscribeOptions) -> Take:
    config, tokenizer = backend.config, backend.tokenizer
    language = options.language if tokenizer.special.is_multilingual else "en"
    if options.language not in (None, "en") and not tokenizer.special.is_multilingual:
        raise UnknownLanguage(
            f"language is {options.language!r}, but the model knows only English: load a multilingual model."
        )
    if max(options.draft, default=0) >= config.vocab_size:
        raise InvalidTranscribeOption(
            f"draft has tokens that are none of the model's {config.vocab_size}: leave it out."
        )
    prompt, vocabulary = options.prompt or "", None
    if options.vocabulary:
        prompt, vocabulary = fit_vocabulary(tokenizer, options.prompt, options.vocabulary, config.text_context)
    prompt_tokens = tuple(tokenizer.encode_context(prompt))[-(config.text_context // 2 - 1) :]
    window_frames = min(config.window_frames, FRAMES_PER_POSITION * (options.audio_context or config.audio_context))
    num_frames = len(samples) // (SAMPLE_RATE // FRAMES_PER_SECOND)
    spans = [(0, num_frames)] if options.condition_on_previous_text else quiet_spans(samples, window_frames)
    context = [] if options.carries_prompt else list(prompt_tokens)
    take = Take(
        take_id=take_id,
        options=options,
        tokenizer=tokenizer,
        rules=TokenRules.make(
            tokenizer,
            suppress=options.suppress_tokens,
            suppress_blank=options.suppress_blank,
            with_timestamps=not options.without_timestamps,
            max_initial_timestamp_s=options.max_initial_timestamp,
        ),
        mel=log_mel(samples, config.num_mels),
        duration_s=len(samples) / SAMPLE_RATE,
        window_frames=window_frames,
        text_context=config.text_context,
        prompt=prompt_tokens,
        vocabulary=vocabulary,
        spans=[Span(start, end, start, list(context), start / FRAMES_PER_SECOND) for start, end in spans],
        language=language,
    )
    if take.knows_language:
        # Refuses now what the first window would refuse.
        take.open(take.next_window(take.spans[0]))
    return take


def _padded(window: Window, num_frames: int) -> NDArray[np.float32]:
    mel = window.take.mel[window.seek : window.seek + window.num_frames]
    return np.pad(mel, ((0, num_frames - len(mel)), (0, 0)))


def _align_request(accepted: Accepted) -> AlignRequest:
    window = accepted.window
    assert window.audio is not None
    return AlignRequest(
        audio=window.audio,
        start=window.take.start_tokens(),
        text_tokens=accepted.text_tokens(window.take.tokenizer.special.eot),
        language=window.take.language,
        num_positions=window.num_positions,
    )
