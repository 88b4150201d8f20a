"""Whisper's special tokens: where they are in a vocabulary, and the sequence that starts a transcript."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from attrs import field, frozen

from headrace_models.errors import UnsupportedFormat
from headrace_models.whisper.errors import InvalidTranscribeOption, UnknownLanguage
from headrace_models.whisper.languages import LANGUAGES

__all__ = ["SpecialTokens", "Task"]

Task = Literal["transcribe", "translate"]

_NUM_OTHERS = 8
_NAMES = {
    "eot": ("<|endoftext|>",),
    "sot": ("<|startoftranscript|>",),
    "translate": ("<|translate|>",),
    "transcribe": ("<|transcribe|>",),
    "sot_lm": ("<|startoflm|>",),
    "sot_prev": ("<|startofprev|>",),
    "no_speech": ("<|nospeech|>", "<|nocaptions|>"),
    "no_timestamps": ("<|notimestamps|>",),
}


def _frozen_ids(ids: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(ids))


@frozen(kw_only=True)
class SpecialTokens:
    """Ids of the special tokens. Timestamps are the last of the vocabulary, 20 ms apart, from `timestamp_begin` on."""

    eot: int
    sot: int
    translate: int
    transcribe: int
    sot_lm: int
    sot_prev: int
    no_speech: int
    no_timestamps: int
    vocab_size: int
    is_multilingual: bool
    """Whether a transcript starts with its language and task; otherwise the model knows English and no task."""
    languages: Mapping[str, int] = field(converter=_frozen_ids)
    """Token ids by code."""

    @property
    def timestamp_begin(self) -> int:
        """The token of 0.00 seconds."""
        return self.no_timestamps + 1

    @property
    def num_timestamps(self) -> int:
        return self.vocab_size - self.timestamp_begin

    @classmethod
    def standard(cls, num_text_tokens: int, vocab_size: int, *, is_multilingual: bool) -> "SpecialTokens":
        """Lay them out as OpenAI's vocabularies do: after the text tokens, 1,501 timestamps at the end.

        Args:
            num_text_tokens: 50,257 of multilingual models, 50,256 of others.
            vocab_size: of the model; one language more makes it one larger.
        """
        num_languages = vocab_size - num_text_tokens - _NUM_OTHERS - 1501
        if not 1 <= num_languages <= len(LANGUAGES):
            raise UnsupportedFormat(
                f"a vocabulary of {vocab_size} tokens is none of Whisper's (51864, 51865 or 51866): put the model's "
                "tokenizer.json beside its weights"
            )
        sot = num_text_tokens + 1
        after = sot + 1 + num_languages
        return cls(
            eot=num_text_tokens,
            sot=sot,
            translate=after,
            transcribe=after + 1,
            sot_lm=after + 2,
            sot_prev=after + 3,
            no_speech=after + 4,
            no_timestamps=after + 5,
            vocab_size=vocab_size,
            is_multilingual=is_multilingual,
            languages={code: sot + 1 + index for index, code in enumerate(list(LANGUAGES)[:num_languages])},
        )

    @classmethod
    def from_vocabulary(
        cls, find: Callable[[str], int | None], vocab_size: int, *, is_multilingual: bool
    ) -> "SpecialTokens":
        """Find them by name in a tokenizer's vocabulary.

        Args:
            find: tells the id of a token, None for one that is not in the vocabulary.

        Raises:
            UnsupportedFormat: one is missing, or there is no room for timestamps after them.
        """
        found: dict[str, int] = {}
        for role, names in _NAMES.items():
            matches = [token for token in map(find, names) if token is not None]
            if not matches:
                raise UnsupportedFormat(
                    f"the tokenizer has no token {names[0]!r}, so it is not Whisper's: take the model's own"
                )
            found[role] = matches[0]
        languages = {code: token for code in LANGUAGES if (token := find(f"<|{code}|>")) is not None}
        made = cls(vocab_size=vocab_size, is_multilingual=is_multilingual, languages=languages, **found)
        if max(found["no_timestamps"], *found.values()) != found["no_timestamps"] or made.num_timestamps < 1:
            raise UnsupportedFormat(
                f"the tokenizer puts <|notimestamps|> at {made.no_timestamps} in a vocabulary of {vocab_size}; the "
                "timestamps must follow it: take the model's own tokenizer"
            )
        return made

    def start(self, *, language: str | None, task: Task, with_timestamps: bool) -> tuple[int, ...]:
        """Return the tokens that start a transcript.

        Args:
            language: a code; ignored by English-only models.

        Raises:
            UnknownLanguage: the model was not trained on the language, or it is needed and missing.
            InvalidTranscribeOption: translation is asked of an English-only model.
        """
        tokens = [self.sot]
        if self.is_multilingual:
            tokens += [self.language_token(language), self.transcribe if task == "transcribe" else self.translate]
        elif task == "translate":
            raise InvalidTranscribeOption(
                "task is 'translate', but the model knows only English: transcribe, or load a multilingual model."
            )
        if not with_timestamps:
            tokens.append(self.no_timestamps)
        return tuple(tokens)

    def language_token(self, language: str | None) -> int:
        """Return the token of a language code.

        Raises:
            UnknownLanguage: this model has none for it.
        """
        if language is None or language not in self.languages:
            raise UnknownLanguage(
                f"language is {language!r}, which this model was not trained on: give one of its "
                f"{len(self.languages)} languages, such as {', '.join(list(self.languages)[:4])}."
            )
        return self.languages[language]
