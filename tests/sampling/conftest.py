"""A vocabulary of bytes and common pieces, as grammars see a tokenizer, and masks as sets of token ids."""

import numpy as np
import pytest

from headrace_sampling import GrammarCompiler, TokenizerFacts

EOS, TURN_END, THINK_END, CALL = 256, 257, 258, 259
_PIECES = (
    *(
        b'{"',
        b'":',
        b'", "',
        b'"}',
        b"},",
        b"[]",
        b"{}",
        b'["',
        b'"]',
        b"true",
        b"false",
        b"null",
        b"name",
        b"type",
        b"value",
    ),
    *(
        b" the",
        b"hello",
        b" world",
        b"ing",
        b"  ",
        b"\n  ",
        b"12",
        b"2024",
        b"0.",
        b"</think>",
        b"ink>",
        b"k>\n",
        b"<f=",
        b"a</think>b",
    ),
    *(
        "é".encode(),
        "日本".encode(),
        "🙂".encode(),
        "🙂".encode()[:2],
        "ö".encode()[1:] + b'"',
        b"-01",
        b"://",
        b"@",
        b".com",
    ),
)
VOCAB_SIZE = 320


@pytest.fixture(scope="session")
def facts():
    """Ids from 0: bytes, two tokens that end a reply, two other special ones, one without bytes, pieces, padding."""
    special = (b"<|end|>", b"<|turn_end|>", b"</think>", b"<call>")
    return TokenizerFacts(
        tokens=(*(bytes([one]) for one in range(256)), *special, b"", *_PIECES),
        special_token_ids=(EOS, TURN_END, THINK_END, CALL),
        eos_token_ids=(EOS, TURN_END),
        vocab_size=VOCAB_SIZE,
    )


@pytest.fixture(scope="session")
def compiler(facts):
    with GrammarCompiler(facts) as compiler:
        yield compiler


@pytest.fixture(scope="session")
def open_ids():
    def open_ids(mask):
        """The open tokens of a mask, or of anything that has one."""
        words = mask if isinstance(mask, np.ndarray) else mask.mask_words()
        return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())

    return open_ids


@pytest.fixture(scope="session")
def write(facts):
    def write(controller, text):
        """Accept a text byte by byte; special tokens are given as ids."""
        for token_id in text.encode() if isinstance(text, str) else text:
            controller.accept(token_id)

    return write
