"""A codec whose tokens are the bytes of UTF-8, so that characters of several tokens are easy to make."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EOS_TOKEN_ID = 256
VOCAB_SIZE = 257


class FakeDecoder:
    """Decodes bytes incrementally; ids from 256 on are special tokens without text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token_id for token_id in token_ids if token_id < EOS_TOKEN_ID))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FailingDecoder(FakeDecoder):
    def push(self, token_ids: Sequence[int]) -> str:
        raise ValueError(f"this decoder always fails, here at {token_ids!r}")


class FakeCodec:
    """Tokens are bytes; `EOS_TOKEN_ID` is the one after them.

    Attributes:
        failing_decoders: numbers of the decoders, counted from 0, that raise on their first push.
    """

    def __init__(self, *, failing_decoders: frozenset[int] = frozenset()) -> None:
        self.failing_decoders = failing_decoders
        self._num_decoders = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        decoder = FakeDecoder()
        return decoder.push(token_ids) + decoder.flush()

    def new_decoder(self) -> FakeDecoder:
        number, self._num_decoders = self._num_decoders, self._num_decoders + 1
        return _FailingDecoder() if number in self.failing_decoders else FakeDecoder()
