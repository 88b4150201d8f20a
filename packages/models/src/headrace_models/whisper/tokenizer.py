"""Text to Whisper's tokens and back, and the splitting of tokens into words."""

import string
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field

from headrace_models.tokenizer import read_tokenizer
from headrace_models.whisper.special import SpecialTokens
from headrace_models.whisper.vocabulary import builtin_tokenizer, token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["WhisperTokenizer", "load_tokenizer"]

_NUM_MULTILINGUAL = 50_257
_NUM_ENGLISH = 50_256
_UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
_REPLACEMENT = "\ufffd"

# What Whisper must not write because nobody says it: brackets of annotations, notes of music, speaker marks.
_SYMBOLS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),  # noqa: SIM905
)
_NOTES = "♩♪♫♬♭♮♯"


@define(slots=False)
class WhisperTokenizer:
    """A Whisper vocabulary. May be used by several threads."""

    tokenizer: "Tokenizer"
    special: SpecialTokens
    _bytes: dict[int, bytes] = field(factory=dict[int, bytes], repr=False, init=False)
    """What each text token stands for, once it was said: to list all would be a seventh of loading."""

    @classmethod
    def wrap(cls, tokenizer: "Tokenizer", special: SpecialTokens) -> "WhisperTokenizer":
        """Wrap a byte-level tokenizer; text is never read as special tokens."""
        tokenizer.encode_special_tokens = True
        return cls(tokenizer, special)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_context(self, text: str) -> list[int]:
        """Encode a prompt, prefix or hint, which follows other text: with one space before it."""
        stripped = text.strip()
        return self.encode(f" {stripped}") if stripped else []

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the text tokens; special tokens and timestamps are left out, broken characters replaced."""
        return b"".join(self._bytes_of(token) for token in ids if token < self.special.eot).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = token_bytes(self.tokenizer.id_to_token(token) or "")
        return found

    @cached_property
    def non_speech_tokens(self) -> tuple[int, ...]:
        """Tokens of what nobody says, as OpenAI's decoder suppresses them: single-token symbols, and all notes."""
        # A hyphen or an apostrophe is fine inside a word, not at its start.
        found = {self.encode(" -")[0], self.encode(" '")[0]}
        for symbol in (*_SYMBOLS, *_NOTES):
            for tokens in (self.encode(symbol), self.encode(f" {symbol}")):
                if len(tokens) == 1 or symbol in _NOTES:
                    found.add(tokens[0])
        return tuple(sorted(found))

    def split_words(self, ids: Sequence[int], language: str | None) -> list[tuple[str, list[int]]]:
        """Split text tokens into words with their tokens; all tokens are in some word.

        Languages that write no spaces are split into characters.
        """
        units = self._split_characters(ids)
        if language in _UNSPACED:
            return units
        words: list[tuple[str, list[int]]] = []
        for text, tokens in units:
            starts = text.startswith(" ") or text.strip() in string.punctuation or not words
            if starts:
                words.append((text, tokens))
            else:
                before, head = words[-1]
                words[-1] = (before + text, head + tokens)
        return words

    def _split_characters(self, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Split wherever what came so far is whole characters, or is broken in the whole text too."""
        whole = self.decode(ids)
        units: list[tuple[str, list[int]]] = []
        pending: list[int] = []
        offset = 0
        for token in ids:
            pending.append(token)
            text = self.decode(pending)
            position = offset + text.find(_REPLACEMENT)
            if _REPLACEMENT not in text or whole[position : position + 1] == _REPLACEMENT:
                units.append((text, pending))
                pending = []
                offset += len(text)
        if pending:
            units.append((self.decode(pending), pending))
        return units


def load_tokenizer(path: Path | None, vocab_size: int, *, is_multilingual: bool) -> WhisperTokenizer:
    """Read a tokenizer.json, or take the vocabulary of Whisper that goes with the model's size.

    Args:
        path: the file; None takes OpenAI's vocabulary.

    Raises:
        SourceError: the file cannot be read.
        UnsupportedFormat: it is not Whisper's, or the size is none of Whisper's.
    """
    if path is None:
        num_text = _NUM_MULTILINGUAL if is_multilingual else _NUM_ENGLISH
        special = SpecialTokens.standard(num_text, vocab_size, is_multilingual=is_multilingual)
        return WhisperTokenizer.wrap(builtin_tokenizer("multilingual" if is_multilingual else "english"), special)
    tokenizer = read_tokenizer(path)
    special = SpecialTokens.from_vocabulary(tokenizer.token_to_id, vocab_size, is_multilingual=is_multilingual)
    return WhisperTokenizer.wrap(tokenizer, special)
