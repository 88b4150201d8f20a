"""The starter model's codec against transformers and mlx-lm, which read the folder that we write for them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headrace_models import DEFAULT_MODEL, load_codec, resolve
from headrace_models.tokenizer_files import tokenizer_files

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox jumps over 13 lazy dogs in 2024, at 3.14159 m/s.",
    "1234567890 000 1,000,000 ½ ² ٣ 四",
    "def f(x: int) -> str:\n    return {'a': x, \"b\": [1, 2]}[0]  # ok\n\n\tif (a&&b) {\r\n}",
    "   leading, trailing   \n\n\n  and\t\ttabs \u00a0\u3000 runs    ",
    "naïve café Ångström Straße İstanbul ﬁ e\u0301 \u200d\u200b",
    "日本語のテキスト。中文、한국어 ไทย हिन्दी עברית العربية",
    "😀👩‍👩‍👧‍👦🇩🇪🏳️‍🌈👍🏽 ok 😀",
    "it's we'll I'd they've can't IT'S",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|> x<|im_end|><repo_name>",
    "a" * 300 + " " * 65 + "\n" * 33,
    "https://example.org/a?b=c&d=%20#e foo_bar-baz C++ C# $x = @y;",
    "\x00\x01\x1f\x7f\u2028\ufeff",
]

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  2 + 2?\n"}],
    [
        {"role": "user", "content": "日本 😀"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "<|im_end|> {{ 7 * 7 }} <&>"},
    ],
]


@pytest.fixture(scope="module")
def source():
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def codec(source):
    return load_codec(source)


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer_files(source, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="module")
def oracle(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def detokenizer(oracle):
    return BPEStreamingDetokenizer(oracle)


@pytest.fixture(scope="module")
def known_bytes(oracle):
    """Bytes that are tokens by themselves, under the characters that stand for them."""
    vocabulary = oracle.get_vocab()
    return {byte for byte, character in bytes_to_unicode().items() if character in vocabulary}


@pytest.mark.parametrize("text", CORPUS)
def test_text_encodes_and_decodes_as_in_transformers(codec, oracle, text):
    """Ids, full decoding and streamed decoding equal transformers', special tokens left out."""
    ids = codec.encode(text)
    assert ids == oracle.encode(text)
    assert codec.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    decoder = codec.new_decoder()
    assert "".join([*(decoder.push([token]) for token in ids), decoder.flush()]) == codec.decode(ids)


@pytest.mark.parametrize("messages", CHATS)
def test_chats_render_as_in_transformers(codec, oracle, messages):
    """The prompt's ids equal apply_chat_template's, with the reply opened."""
    prepared = codec.prepare_chat(messages)
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert prepared.ids == expected


def test_vocabulary_and_end_tokens_equal_transformers(codec, oracle):
    """Size, end token and special tokens are the ones that transformers reads."""
    assert codec.vocab_size == len(oracle) == 49152
    assert codec.eos_token_ids == {oracle.eos_token_id} == {2}
    assert codec.decode(range(17)) == oracle.decode(range(17), skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_encodes_as_in_transformers_and_comes_back(codec, oracle, known_bytes, text):
    """The two never disagree, and text comes back unless it has one of the bytes that SmolLM2 has no token for."""
    ids = codec.encode(text)
    assert ids == oracle.encode(text)
    assert codec.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    if known_bytes.issuperset(text.encode()):
        assert codec.decode(ids) == text


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_streamed_text_equals_mlx_lms_detokenizer(codec, detokenizer, ids):
    """Any ids stream as mlx-lm's own detokenizer streams them, less what is no character."""
    # mlx-lm shows special tokens, which ours never does, and the letter that stands for a zero byte.
    ids = [token for token in ids if token > 16 and codec.decode([token]) not in ("\x00", "\ufffd")]
    detokenizer.reset()
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    decoder = codec.new_decoder()
    ours = "".join([*(decoder.push([token]) for token in ids), decoder.flush()])
    # mlx-lm also drops a space that starts a reply.
    assert ours.lstrip(" ") == detokenizer.text.replace("\ufffd", "").lstrip(" ")
