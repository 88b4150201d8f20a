"""What a transcription is asked for, validated once."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from attrs import Attribute, field, frozen

from headrace_models.whisper.decoded import Beam
from headrace_models.whisper.errors import InvalidTranscribeOption
from headrace_models.whisper.languages import language_code

if TYPE_CHECKING:
    from headrace_models.whisper.special import Task

__all__ = ["MAX_TERMS", "MAX_TERM_BYTES", "TranscribeOptions"]

MAX_TERMS = 8_192
MAX_TERM_BYTES = 16_384
_MAX_BEAM = 16
_MAX_CANDIDATES = 16
_MAX_TOKENS = 1_024
_AUDIO_CONTEXT = (64, 1_500)


def _number(low: float, high: float, *, optional: bool = False) -> Any:
    def check(_: TranscribeOptions, attribute: Attribute[Any], value: object) -> None:
        if optional and value is None:
            return
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (isfinite(value) and low <= value <= high)
        ):
            raise InvalidTranscribeOption(f"{attribute.name} is {value!r}; give a number from {low:g} to {high:g}.")

    return check


def _count(low: int, high: int, *, optional: bool = True) -> Any:
    def check(_: TranscribeOptions, attribute: Attribute[Any], value: object) -> None:
        if optional and value is None:
            return
        if type(value) is not int or not low <= value <= high:
            raise InvalidTranscribeOption(f"{attribute.name} is {value!r}; give an integer from {low} to {high}.")

    return check


def _choice(*choices: object) -> Any:
    def check(_: TranscribeOptions, attribute: Attribute[Any], value: object) -> None:
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            listed = ", ".join(map(repr, choices))
            raise InvalidTranscribeOption(f"{attribute.name} is {value!r}; give one of {listed}.")

    return check


def _text(_: TranscribeOptions, attribute: Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise InvalidTranscribeOption(f"{attribute.name} is a {type(value).__name__}; give text, or None.")


def _temperatures(value: object) -> tuple[float, ...]:
    if isinstance(value, int | float):
        return (value,)
    return tuple(cast("list[float]", value)) if isinstance(value, list | tuple) else cast("tuple[float, ...]", value)


def _check_temperatures(options: TranscribeOptions, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple) or not value:
        raise InvalidTranscribeOption(f"temperature is {value!r}; give a number from 0 to 1, or some to try in turn.")
    for item in cast("tuple[object, ...]", value):
        _number(0, 1)(options, attribute, item)


def _terms(value: object) -> tuple[str, ...]:
    """Take a list of terms, or one text with commas between them."""
    if isinstance(value, str):
        return tuple(term for term in (part.strip() for part in value.split(",")) if term)
    return tuple(cast("list[str]", value)) if isinstance(value, list | tuple) else cast("tuple[str, ...]", value)


def _check_terms(_: TranscribeOptions, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple):
        raise InvalidTranscribeOption(f"{attribute.name} is a {type(value).__name__}; give a list of terms.")
    terms = cast("tuple[object, ...]", value)
    if len(terms) > MAX_TERMS:
        raise InvalidTranscribeOption(f"{attribute.name} has {len(terms)} terms; at most {MAX_TERMS} are taken.")
    for term in terms:
        if not isinstance(term, str) or not term.strip() or len(term.encode(errors="replace")) > MAX_TERM_BYTES:
            raise InvalidTranscribeOption(
                f"{attribute.name} has the term {term!r:.40}; each is text of 1 to {MAX_TERM_BYTES} bytes."
            )


def _language(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidTranscribeOption(f"language is {value!r}; give a code or a name, or None to have it detected.")
    return language_code(value)


def _is_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(type(item) is int and item >= 0 for item in cast("tuple[Any]", value))


def _token_ids(_: TranscribeOptions, attribute: Attribute[Any], value: object) -> None:
    if value is not None and not _is_ids(value):
        raise InvalidTranscribeOption(f"{attribute.name} is {value!r}; give token ids, or None for what nobody says.")


def _draft(_: TranscribeOptions, attribute: Attribute[Any], value: object) -> None:
    if not _is_ids(value):
        # Without its value, which is what somebody said.
        raise InvalidTranscribeOption(
            f"{attribute.name} is a {type(value).__name__}; give a tuple of token ids, 0 or more each."
        )


def _tuple_or_none(value: object) -> tuple[int, ...] | None:
    return tuple(cast("list[int]", value)) if isinstance(value, list) else cast("tuple[int, ...] | None", value)


_FLAG = _choice(True, False)


@frozen(kw_only=True)
class TranscribeOptions:
    """How audio is transcribed. The defaults are those of OpenAI's `transcribe`.

    Raises:
        InvalidTranscribeOption: a value is out of range, or two exclude each other.
        UnknownLanguage: Whisper does not know the language.
    """

    language: str | None = field(default=None, converter=_language)
    """Code or name; None has it detected."""
    task: Task = field(default="transcribe", validator=_choice("transcribe", "translate"))
    """`translate` writes English, whatever is spoken."""
    temperature: tuple[float, ...] = field(
        default=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0), converter=_temperatures, validator=_check_temperatures
    )
    """Tried in turn until a window succeeds; one number switches that off."""
    compression_ratio_threshold: float | None = field(default=2.4, validator=_number(0, 100, optional=True))
    """A window whose text zlib makes smaller by more has failed: it repeats itself."""
    logprob_threshold: float | None = field(default=-1.0, validator=_number(-100, 0, optional=True))
    """A window whose mean log-probability is below has failed."""
    no_speech_threshold: float | None = field(default=0.6, validator=_number(0, 1, optional=True))
    """A window that is likelier to be silence, and whose log-probability is below its threshold, is silent."""
    condition_on_previous_text: bool = field(default=True, validator=_FLAG)
    """Give each window the text before it; windows then follow one another. Otherwise they decode as a batch."""
    prompt: str | None = field(default=None, validator=_text)
    """Text as if it came before the audio: names, style, spelling."""
    vocabulary: tuple[str, ...] = field(default=(), converter=_terms, validator=_check_terms)
    """Terms that may be said; as many as fit follow the prompt."""
    carry_prompt: bool | None = field(default=None, validator=_choice(True, False, None))
    """Give every window the prompt, not the first alone; None does so when there is a vocabulary."""
    prefix: str | None = field(default=None, validator=_text)
    """Text that the first window's transcript starts with; it is not in the result."""
    word_timestamps: bool = field(default=False, validator=_FLAG)
    without_timestamps: bool = field(default=False, validator=_FLAG)
    """Write no timestamps: one segment per window."""
    max_initial_timestamp: float | None = field(default=1.0, validator=_number(0, 30, optional=True))
    """The latest start of a window's first segment, in seconds."""
    suppress_tokens: tuple[int, ...] | None = field(default=None, converter=_tuple_or_none, validator=_token_ids)
    """Tokens that are not written; None means symbols that nobody says."""
    suppress_blank: bool = field(default=True, validator=_FLAG)
    beam_size: int | None = field(default=None, validator=_count(1, _MAX_BEAM))
    """Search with so many beams at temperature 0; None takes the likeliest token."""
    patience: float = field(default=1.0, validator=_number(0.1, 10))
    """The search ends at `beam_size * patience` finished beams."""
    length_penalty: float | None = field(default=None, validator=_number(0, 1, optional=True))
    """Alpha of Google's normalization; None divides by the length."""
    best_of: int | None = field(default=None, validator=_count(1, _MAX_CANDIDATES))
    """Samples above temperature 0, of which the likeliest is taken."""
    max_tokens: int | None = field(default=None, validator=_count(1, _MAX_TOKENS))
    """Per window; None means half the model's context."""
    repetition_guard: bool = field(default=True, validator=_FLAG)
    """End a window that repeats itself early, and if nothing helps, leave the repetitions out."""
    audio_context: int | None = field(default=None, validator=_count(*_AUDIO_CONTEXT))
    """Positions of 20 ms per window; fewer are faster on short audio."""
    draft: tuple[int, ...] = field(default=(), validator=_draft, repr=False)
    """Tokens of an earlier transcript of this audio or of its beginning: what greedy decoding writes of them anyway is
    written at once. They change nothing but the time."""
    open_end: bool = field(default=False, validator=_FLAG)
    """The audio may end in the middle of a sentence: text at its end that no timestamp closes is kept as a segment,
    instead of being heard again in a window of its own."""
    seed: int = field(default=0, validator=_count(0, 2**63 - 1, optional=False))
    """Of the draws above temperature 0."""

    def __attrs_post_init__(self) -> None:
        if self.beam_size is not None and 0 not in self.temperature:
            raise InvalidTranscribeOption(
                f"beam_size is {self.beam_size}, but temperature {self.temperature!r} has no 0, where beams are used: "
                "set temperature to 0, or leave beam_size out."
            )
        if self.patience != 1.0 and self.beam_size is None:
            raise InvalidTranscribeOption(
                f"patience is {self.patience:g} without beam_size: set it, or leave patience."
            )
        if self.word_timestamps and self.without_timestamps:
            raise InvalidTranscribeOption(
                "word_timestamps and without_timestamps are both set: words are placed in timed segments; unset one."
            )

    @property
    def beam(self) -> Beam | None:
        """The search at temperature 0."""
        return None if self.beam_size is None else Beam(size=self.beam_size, patience=self.patience)

    @property
    def carries_prompt(self) -> bool:
        """Whether every window gets the prompt."""
        return bool(self.vocabulary) if self.carry_prompt is None else self.carry_prompt
