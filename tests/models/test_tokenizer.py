"""Tokenizers from GGUF metadata: small vocabularies whose right answers can be worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.decoder import ByteDecoder, make_piece_table
from headrace_models.errors import SourceError, UnsupportedFormat
from headrace_models.tokenizer import build_tokenizer, read_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def alphabet():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]


def byte_level(pre, merges=(), extra=()):
    tokens = ["<|end|>", *alphabet(), *("".join(merge.split(" ")) for merge in merges), *extra]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, *[NORMAL] * (len(tokens) - 1)],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": 0,
    }


def scored(pieces, **more):
    """Metadata of a SentencePiece vocabulary; `pieces` maps text to score."""
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


# In an order that is not the scores', so that cutting by order shows.
PIECES = {"▁": -10.0, "a": -11.0, "b": -12.0, "c": -13.0, "ab": -2.0, "bc": -1.0, "bcb": -0.5, "▁a": -3.0, "c▁": -2.5}


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "glm4", "dbrx", "gpt-4o", "tekken"])
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=30))
def test_byte_level_round_trip(pre, text):
    """Any text comes back; qwen2 alone composes characters first, as its authors' tokenizer does."""
    import unicodedata

    tokenizer = build_tokenizer(byte_level(pre, ["a b"]))
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text).ids) == expected


def pieces(pre, text, merges):
    return build_tokenizer(byte_level(pre, merges)).encode(text).tokens


def test_the_split_decides_about_digits():
    """One digit at a time for smollm and qwen2, up to three for llama-bpe, whole numbers for gpt-2."""
    merges = ["1 2", "12 3", "123 4"]
    assert pieces("smollm", "1234", merges) == ["1", "2", "3", "4"]
    assert pieces("qwen2", "1234", merges) == ["1", "2", "3", "4"]
    assert pieces("llama-bpe", "1234", merges) == ["123", "4"]
    assert pieces("gpt-2", "1234", merges) == ["1234"]


# The patterns as the models' authors publish them, in tokenizer.json of Phi-4 mini and in Mistral's tekken.json.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    rf"|\p{{N}}{{1,3}}|{_REST}",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}",
}


@pytest.mark.parametrize("pre", PUBLISHED)
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("aBcé'sS12 \n\r/.,-ǅ中"), max_size=16))
def test_cased_splits_are_the_published_ones(pre, text):
    """Words are cut where the published pattern cuts, read by another engine of regular expressions."""
    import regex

    split = build_tokenizer(byte_level(pre)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == regex.findall(PUBLISHED[pre], text)


def test_whole_words_need_no_merges_where_the_authors_say_so():
    """Llama 3's and Tekken's vocabularies hold words that merges do not lead to; others cut them."""
    for pre, expected in {"llama-bpe": ["abc"], "tekken": ["abc"], "glm4": ["a", "b", "c"]}.items():
        assert build_tokenizer(byte_level(pre, extra=["abc"])).encode("abc").tokens == expected


def test_special_tokens_in_text_are_one_token():
    """A control token written in text is that token, whatever surrounds it."""
    assert build_tokenizer(byte_level("smollm")).encode("a<|end|>b").ids[1] == 0


def test_an_unknown_split_is_named():
    """A split nobody here knows is refused by its name, and a missing one too: a guess would change the tokens."""
    for pre in ("default", None):
        with pytest.raises(UnsupportedFormat, match=repr(pre)):
            build_tokenizer(byte_level(pre))
    with pytest.raises(UnsupportedFormat, match="'tekken-9'"):
        build_tokenizer(byte_level("tekken-9"))
    with pytest.raises(UnsupportedFormat, match="'bert'"):
        build_tokenizer({"tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize("name", ["tokens", "token_type", "merges"])
def test_a_missing_list_is_named(name):
    """Metadata without one of its lists is an error that names the list."""
    metadata = byte_level("smollm")
    del metadata[f"tokenizer.ggml.{name}"]
    with pytest.raises(SourceError, match=f"tokenizer.ggml.{name}"):
        build_tokenizer(metadata)


def test_a_token_named_twice_is_refused():
    """Two ids for one text cannot both be encoded, so the vocabulary is refused."""
    with pytest.raises(SourceError, match="twice"):
        build_tokenizer(byte_level("smollm", extra=["a"]))


def merge_by_score(text, pieces):
    """SentencePiece's rule, slowly: merge the adjacent pair whose joined piece scores best, leftmost first."""
    symbols = list(text)
    while True:
        scores = {n: pieces.get(symbols[n] + symbols[n + 1]) for n in range(len(symbols) - 1)}
        best = max((n for n, score in scores.items() if score is not None), key=lambda n: (scores[n], -n), default=None)
        if best is None:
            return symbols
        symbols[best : best + 2] = ["".join(symbols[best : best + 2])]


@settings(max_examples=100, deadline=None)
@given(text=st.text("abc ", max_size=12))
def test_scored_pieces_merge_as_sentencepiece_does(text):
    """The built BPE cuts text as the plain rule over scores does, after the start token."""
    tokenizer = build_tokenizer(scored(PIECES, add_space_prefix=False))
    assert tokenizer.encode(text).tokens == ["<s>", *merge_by_score(text.replace(" ", "▁"), PIECES)]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=12).filter(lambda text: "▁" not in text), prefix=st.booleans())
def test_scored_round_trip_and_streaming(text, prefix):
    """Any text comes back through bytes, at once and token by token, with and without the prefixed space."""
    tokenizer = build_tokenizer(scored(PIECES, add_space_prefix=prefix))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    decoder = ByteDecoder(make_piece_table(tokenizer, frozenset({0, 1, 2})))
    assert "".join(decoder.push([token]) for token in ids) == text


def test_the_start_token_is_added_where_the_file_says():
    """The start token comes by default for scored vocabularies, and not against the file's word."""
    assert build_tokenizer(scored(PIECES)).encode("a").ids[0] == 1
    assert 1 not in build_tokenizer(scored(PIECES, add_bos_token=False)).encode("a").ids
    assert 0 not in build_tokenizer(byte_level("smollm")).encode("a").ids


def test_visible_tokens_of_users_win_over_merges():
    """A user-defined token is found in text as a whole, and shown."""
    metadata = byte_level("smollm", ["a b"], extra=["<tool>"])
    metadata["tokenizer.ggml.token_type"][-1] = USER
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.encode("ab<tool>").tokens == ["ab", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("ab<tool>").ids) == "ab<tool>"


def test_a_damaged_tokenizer_file_is_a_source_error(tmp_path):
    """A tokenizer.json that is none is an error with its path; truncation set in one is switched off."""
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(SourceError, match=r"tokenizer\.json"):
        read_tokenizer(path)
    tokenizer = build_tokenizer(byte_level("smollm"))
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    assert len(read_tokenizer(path).encode("abcdefgh").ids) == 8
