"""Token ids to text as they come: constant work per token, and never a half character."""

import codecs
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from attrs import define, field

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["ByteDecoder", "PieceTable", "TokenDecoder", "WindowDecoder", "make_piece_table"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE_LENGTH = len("<0x00>")
_MAX_WINDOW = 32


class TokenDecoder(Protocol):
    """Turns one row's token ids into text as they come."""

    def push(self, token_ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


@define
class PieceTable:
    """The bytes that each token stands for, looked up once per token; shared by all decoders of a codec.

    Attributes:
        tokenizer: what the tokens are.
        hidden: ids that are never shown: special tokens and end tokens.
        alphabet: bytes of byte-level BPE's printable characters; None for pieces with byte fallback.
        replacements: texts to replace in a piece, for example the word boundary mark by a space.
        num_leading_spaces: spaces that decoding strips from the start of a text.
    """

    tokenizer: "Tokenizer"
    hidden: frozenset[int]
    alphabet: Mapping[str, int] | None
    replacements: tuple[tuple[str, str], ...] = ()
    num_leading_spaces: int = 0
    pieces: dict[int, bytes] = field(init=False, factory=dict[int, bytes], repr=False)

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; hidden and unknown ids have none."""
        known = self.pieces.get(token_id)
        if known is None:
            known = self.pieces[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self.hidden:
            return b""
        piece = self.tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self.alphabet is not None:
            if all(character in self.alphabet for character in piece):
                return bytes(self.alphabet[character] for character in piece)
            return piece.encode()
        if len(piece) == _BYTE_PIECE_LENGTH and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes.fromhex(piece[3:5])
            except ValueError:
                return piece.encode()
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece.encode()


class ByteDecoder:
    """Decodes a row whose tokens are bytes; bytes that cannot become a character are dropped."""

    __slots__ = ("_bytes_of", "_num_leading_spaces", "_utf8")

    def __init__(self, table: PieceTable) -> None:
        self._bytes_of = table.bytes_of
        self._num_leading_spaces = table.num_leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore")

    def push(self, token_ids: Sequence[int]) -> str:
        text = self._utf8.decode(b"".join(map(self._bytes_of, token_ids)))
        return text if not self._num_leading_spaces else self._strip(text)

    def flush(self) -> str:
        self._utf8.reset()
        return ""

    def _strip(self, text: str) -> str:
        while text and self._num_leading_spaces:
            if not text.startswith(" "):
                self._num_leading_spaces = 0
                break
            text = text[1:]
            self._num_leading_spaces -= 1
        return text


class WindowDecoder:
    """Decodes a row of any other tokenizer, by decoding the last few tokens with and without the new ones."""

    __slots__ = ("_hidden", "_shown", "_tokenizer", "_window")

    def __init__(self, tokenizer: "Tokenizer", hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        # How many tokens of the window have been shown already.
        self._shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in token_ids if token_id not in self._hidden)

    def flush(self) -> str:
        before, after = self._texts()
        self._window.clear()
        self._shown = 0
        return after[len(before) :].rstrip(_REPLACEMENT).replace(_REPLACEMENT, "")

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        before, after = self._texts()
        unfinished = after.endswith(_REPLACEMENT) or len(after) <= len(before)
        if unfinished and len(self._window) - self._shown < _MAX_WINDOW:
            return ""
        # One shown token stays in the window, because a tokenizer may join words by what came before.
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return after[len(before) :].replace(_REPLACEMENT, "")

    def _texts(self) -> tuple[str, str]:
        # Hidden tokens never get here; special ones that are shown would be left out.
        decode = self._tokenizer.decode
        return (
            decode(self._window[: self._shown], skip_special_tokens=False),
            decode(self._window, skip_special_tokens=False),
        )


def make_piece_table(tokenizer: "Tokenizer", hidden: frozenset[int]) -> PieceTable | None:
    """Recognise a tokenizer whose tokens are plain bytes; None when its decoder does more than that."""
    from tokenizers import decoders

    decoder = tokenizer.decoder
    if isinstance(decoder, decoders.ByteLevel):
        return PieceTable(tokenizer, hidden, _byte_alphabet())
    if not isinstance(decoder, decoders.Sequence):
        return None
    # The parts of a sequence are only visible in its saved state.
    state = cast("dict[str, object]", json.loads(decoder.__getstate__()))
    return _fallback_table(tokenizer, hidden, cast("list[dict[str, object]]", state["decoders"]))


def _fallback_table(
    tokenizer: "Tokenizer", hidden: frozenset[int], parts: Sequence[Mapping[str, object]]
) -> PieceTable | None:
    kinds = [part["type"] for part in parts]
    num_replacements = kinds.index("ByteFallback") if "ByteFallback" in kinds else 0
    tail = kinds[num_replacements:]
    if tail not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    replacements: list[tuple[str, str]] = []
    for part in parts[:num_replacements]:
        pattern = part.get("pattern")
        old = cast("dict[str, object]", pattern).get("String") if isinstance(pattern, dict) else None
        if part["type"] != "Replace" or not isinstance(old, str):
            return None
        replacements.append((old, str(part["content"])))
    num_leading_spaces = 0
    if tail[-1] == "Strip":
        strip = parts[-1]
        if strip["content"] != " " or strip["stop"] != 0:
            return None
        num_leading_spaces = cast("int", strip["start"])
    return PieceTable(tokenizer, hidden, None, tuple(replacements), num_leading_spaces)


def _byte_alphabet() -> dict[str, int]:
    """Map byte-level BPE's characters to bytes (Radford et al. 2019): printable Latin-1 stands for itself."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
