"""The fields of a transcription (W-21), from a form or from JSON, and the options that they become."""

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import attrs
from attrs import evolve, frozen
from cattrs import Converter

from headrace_http_api.audio_ports import DEFAULT_TEMPERATURES, SpeechFilter, TranscriptionOptions
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.json_body import shown
from headrace_http_api.unsupported import refuse_unsupported
from headrace_http_api.validation import Between, FieldError, OneOf, make_converter, structure

__all__ = [
    "ACCEPTED_WITHOUT_EFFECT",
    "AUDIO_UNSUPPORTED",
    "FORMATS",
    "SESSION_FORMATS",
    "Task",
    "TranscriptionFields",
    "form_values",
    "read_fields",
]

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
STREAM_FORMATS = ("json", "verbose_json")
SESSION_FORMATS = ("json", "verbose_json")
GRANULARITIES = ("segment", "word")
MAX_TERMS = 8_192
MAX_TERM_BYTES = 16_384
MAX_VOCABULARY_BYTES = 2**20
MAX_PROMPT_CHARS = 100_000
_TEMPERATURE_STEP = 0.2

Task = Literal["transcribe", "translate"]
Terms = tuple[str, ...]
Granularities = tuple[Annotated[str, OneOf(GRANULARITIES)], ...]

ACCEPTED_WITHOUT_EFFECT = frozenset({"user"})

# Names that change the answer and are not served, with the values that ask for nothing.
AUDIO_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "chunking_strategy": ("auto",),
    "include": ([],),
    "known_speaker_names": ([],),
    "known_speaker_references": ([],),
}
_UNSUPPORTED_LISTS = frozenset({"include", "known_speaker_names", "known_speaker_references"})


@frozen(kw_only=True)
class TranscriptionFields:
    """A validated request for a transcription or a translation, but for the audio; None is "not given"."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Annotated[str, OneOf(FORMATS)] = "json"
    temperature: Annotated[float, Between(0, 1)] = 0.0
    stream: bool = False
    timestamp_granularities: Granularities | None = None
    beam_size: Annotated[int, Between(1, 16)] | None = None
    condition_on_previous_text: bool = True
    no_speech_threshold: Annotated[float, Between(0, 1)] | None = None
    without_timestamps: bool = False
    vocabulary: Terms | None = None
    vad: bool = False
    vad_threshold: Annotated[float, Between(0, 1)] | None = None
    vad_min_speech_ms: Annotated[int, Between(0, 60_000)] | None = None
    vad_trim: bool = False
    faithful: bool = False
    audio_ctx: Annotated[int, Between(64, 1_500)] | None = None

    @property
    def wants_words(self) -> bool:
        return self.timestamp_granularities is not None and "word" in self.timestamp_granularities

    def check(self, *, formats: Sequence[str] = FORMATS) -> None:
        """Refuse fields that contradict each other, and texts that are far longer than a model could use.

        Args:
            formats: those that this route answers in.

        Raises:
            InvalidRequest: names one of them.
        """
        self._check_lengths()
        formats = [one for one in formats if one in STREAM_FORMATS] if self.stream else formats
        if self.response_format not in formats:
            where = "of a stream" if self.stream else "of a session"
            raise InvalidRequest(
                f"response_format is {self.response_format!r}; the format {where} is one of {', '.join(formats)}",
                param="response_format",
            )
        if self.wants_words and self.response_format != "verbose_json" and not self.stream:
            raise InvalidRequest(
                f"timestamp_granularities asks for words, which {self.response_format!r} does not carry; set "
                "response_format to verbose_json, or stream to true",
                param="timestamp_granularities",
            )
        if self.wants_words and self.without_timestamps:
            raise InvalidRequest(
                "without_timestamps is true, and timestamp_granularities asks for words, which are placed in timed "
                "segments; leave out one of them",
                param="without_timestamps",
            )
        if (self.beam_size or 1) > 1 and self.temperature > 0:
            raise InvalidRequest(
                f"beam_size is {self.beam_size}, and temperature is {self.temperature:g}; beams are searched at "
                "temperature 0: leave out one of them",
                param="beam_size",
            )
        if self.vad_threshold in (0, 1):
            raise InvalidRequest(
                f"vad_threshold is {self.vad_threshold:g}; it must lie between 0 and 1, both excluded",
                param="vad_threshold",
            )
        if not self.vad:
            self._check_no_vad()

    def _check_lengths(self) -> None:
        num_chars = len(self.prompt or "")
        if num_chars > MAX_PROMPT_CHARS:
            raise InvalidRequest(
                f"prompt has {num_chars} characters; at most {MAX_PROMPT_CHARS} are taken, and a model reads its last "
                "few hundred words: shorten it",
                param="prompt",
            )
        num_bytes = sum(len(term.encode(errors="replace")) for term in self.vocabulary or ())
        if num_bytes > MAX_VOCABULARY_BYTES:
            raise InvalidRequest(
                f"vocabulary has {num_bytes} bytes in all; at most {MAX_VOCABULARY_BYTES} are taken: leave out terms",
                param="vocabulary",
            )

    def _check_no_vad(self) -> None:
        given = {
            "vad_threshold": self.vad_threshold is not None,
            "vad_min_speech_ms": self.vad_min_speech_ms is not None,
            "vad_trim": self.vad_trim,
        }
        for name, is_given in given.items():
            if is_given:
                raise InvalidRequest(
                    f"{name} is set, and vad is not, so that nothing looks for speech; set vad to true, or leave "
                    f"out {name}",
                    param=name,
                )

    def options(self, task: Task) -> TranscriptionOptions:
        """Build what the service is asked for."""
        options = TranscriptionOptions(
            task=task,
            language=self.language,
            prompt=self.prompt,
            vocabulary=self.vocabulary or (),
            temperature=_temperatures(self.temperature),
            beam_size=self.beam_size if (self.beam_size or 1) > 1 else None,
            condition_on_previous_text=self.condition_on_previous_text,
            word_timestamps=self.wants_words,
            without_timestamps=self.without_timestamps,
            repetition_guard=not self.faithful,
            audio_context=self.audio_ctx,
            speech=self._speech(),
        )
        if self.no_speech_threshold is None:
            return options
        return evolve(options, no_speech_threshold=self.no_speech_threshold)

    def _speech(self) -> SpeechFilter | None:
        if not self.vad:
            return None
        defaults = SpeechFilter()
        min_speech_ms = self.vad_min_speech_ms
        return SpeechFilter(
            threshold=defaults.threshold if self.vad_threshold is None else self.vad_threshold,
            min_speech_s=defaults.min_speech_s if min_speech_ms is None else min_speech_ms / 1000,
            is_trimming=self.vad_trim,
        )


def read_fields(values: Mapping[str, Any], *, formats: Sequence[str] = FORMATS) -> TranscriptionFields:
    """Validate the fields of a request.

    Args:
        values: by name, as JSON has them, without the audio.
        formats: those that this route answers in.

    Raises:
        InvalidRequest: for the first field at fault; `param` is its path.
    """
    refuse_unsupported(values, AUDIO_UNSUPPORTED)
    fields = structure(_CONVERTER, values, TranscriptionFields)
    fields.check(formats=formats)
    return fields


def form_values(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Turn the texts of a form into values as JSON has them; an empty text is no value.

    A list is a field that is repeated, with or without `[]` after its name.

    Raises:
        InvalidRequest: a text is not of its field's type, or a field that is no list is given twice.
    """
    values: dict[str, Any] = {}
    for given_name, text in pairs:
        name = given_name.removesuffix("[]")
        if not text:
            continue
        if name in _LISTS:
            values.setdefault(name, []).append(text)
        elif name in values:
            raise InvalidRequest(f"{name} is given more than once; give it once", param=name)
        else:
            values[name] = _typed(name, text)
    # A lone term may be a list of its own, with commas.
    if len(values.get("vocabulary", ())) == 1:
        values["vocabulary"] = values["vocabulary"][0]
    return values


def _typed(name: str, text: str) -> Any:
    kind = _KINDS.get(name, str)
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise InvalidRequest(f"{name} is {shown(text)}; it must be true or false", param=name)
        return _BOOLEANS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text[:64])
        except ValueError:
            wanted = "an integer" if kind is int else "a number"
            raise InvalidRequest(f"{name} is {shown(text)}; it must be {wanted}", param=name) from None
    return text


def _temperatures(lowest: float) -> tuple[float, ...]:
    """Return what is tried in turn: OpenAI's steps, from the lowest one on."""
    if lowest == 0:
        return DEFAULT_TEMPERATURES
    count = int((1 - lowest) / _TEMPERATURE_STEP + 1e-9) + 1
    return tuple(round(lowest + step * _TEMPERATURE_STEP, 6) for step in range(count))


def _to_terms(value: Any, _kind: Any) -> Terms | None:
    if value is None:
        return None
    is_text = isinstance(value, str)
    entries: Any = [one for one in (part.strip() for part in value.split(",")) if one] if is_text else value
    if not isinstance(entries, list):
        raise FieldError(f"is {shown(value)}; it must be a list of terms, or one text with commas between them")
    if len(entries) > MAX_TERMS:
        raise FieldError(f"has {len(entries)} terms; at most {MAX_TERMS} are taken")
    for index, entry in enumerate(entries):
        subpath = "" if is_text else f"[{index}]"
        if not isinstance(entry, str) or not entry.strip():
            raise FieldError(f"is {shown(entry)}; a term is text that is not blank", subpath=subpath)
        if len(entry.encode(errors="replace")) > MAX_TERM_BYTES:
            raise FieldError(f"has {len(entry)} characters; a term has at most {MAX_TERM_BYTES} bytes", subpath=subpath)
    return tuple(entries)


def _to_granularities(value: Any, _kind: Any) -> tuple[str, ...] | None:
    entries = [value] if isinstance(value, str) else value
    if entries is not None and not isinstance(entries, list):
        raise FieldError(f"is {shown(value)}; it must be a list of {', '.join(GRANULARITIES)}")
    for index, entry in enumerate(entries or ()):
        try:
            OneOf(GRANULARITIES).check(entry)
        except FieldError as exc:
            raise exc.inside(index) from None
    return None if entries is None else tuple(entries)


def _make_converter() -> Converter:
    converter = make_converter()
    converter.register_structure_hook_func(lambda kind: kind in (Terms, Terms | None), _to_terms)
    converter.register_structure_hook_func(
        lambda kind: kind in (Granularities, Granularities | None), _to_granularities
    )
    return converter


def _kind_of(kind: Any) -> Any:
    """Return the plain type of a field: without None, without limits."""
    inner = [one for one in get_args(kind) if one is not NoneType] if type(None) in get_args(kind) else [kind]
    (only,) = inner
    return get_args(only)[0] if get_origin(only) is Annotated else only


_CONVERTER = _make_converter()
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_KINDS = {one.name: _kind_of(one.type) for one in attrs.fields(TranscriptionFields)}
_LISTS = frozenset({name for name, kind in _KINDS.items() if get_origin(kind) is tuple}) | _UNSUPPORTED_LISTS
