"""Whisper's two vocabularies, for checkpoints that carry none: byte-level BPE from the merges in `vocabularies/`."""

import lzma
import struct
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["BYTE_SYMBOLS", "VocabularyName", "builtin_tokenizer", "token_bytes"]

VocabularyName = Literal["english", "multilingual"]

_NUM_MERGES = 50_000


def _byte_symbols() -> dict[int, str]:
    """Byte-level BPE's letter of each byte (Radford et al. 2019): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in symbols)
    return symbols | {byte: chr(0x100 + number) for number, byte in enumerate(others)}


BYTE_SYMBOLS: Mapping[int, str] = _byte_symbols()
"""The letter that stands for each byte in a byte-level vocabulary, in the order of their tokens."""

_BYTES = {symbol: byte for byte, symbol in BYTE_SYMBOLS.items()}


def builtin_tokenizer(name: VocabularyName) -> "Tokenizer":
    """Build the tokenizer of English-only models or that of multilingual ones, without special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    packed = lzma.decompress(files("headrace_models.whisper").joinpath("vocabularies", f"{name}.xz").read_bytes())
    ids = struct.unpack(f"<{2 * _NUM_MERGES}H", packed)
    tokens = list(BYTE_SYMBOLS.values())
    merges: list[tuple[str, str]] = []
    for left, right in zip(ids[:_NUM_MERGES], ids[_NUM_MERGES:], strict=True):
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def token_bytes(symbols: str) -> bytes:
    """Return the bytes that a token of a byte-level vocabulary stands for; foreign letters stand for themselves."""
    if all(symbol in _BYTES for symbol in symbols):
        return bytes(_BYTES[symbol] for symbol in symbols)
    return symbols.encode()
