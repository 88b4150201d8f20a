"""The codec: streamed text equals text decoded at once, prompts keep one start token, folders and GGUF agree."""

import json
import threading

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from headrace_models.codec import Codec, load_codec
from headrace_models.decoder import ByteDecoder, WindowDecoder
from headrace_models.errors import TemplateError
from headrace_models.sources import ModelSource
from headrace_models.tokenizer_files import tokenizer_files
from headrace_models.tokenizer_settings import TokenizerSettings

REPLACEMENT = "\ufffd"
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ tail }}"


def byte_tokenizer():
    """Every byte a token, in byte-level BPE's alphabet, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token_id for token_id, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>"])
    tokenizer.add_tokens([AddedToken("<tool> é", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


def make_codec(tokenizer=None, templates=None):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    templates = {"default": TEMPLATE} if templates is None else templates
    return Codec(
        tokenizer or byte_tokenizer(),
        TokenizerSettings(special_tokens=special, templates=templates),
        eos_token_ids=frozenset({257}),
        identity="x",
    )


CODEC = make_codec()
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=30)


def stream(codec, ids, sizes=()):
    """Push ids in groups of the given sizes, the rest one by one."""
    decoder = codec.new_decoder()
    deltas = []
    ids = list(ids)
    for size in sizes:
        deltas.append(decoder.push(ids[:size]))
        ids = ids[size:]
    deltas.extend(decoder.push([token]) for token in ids)
    deltas.append(decoder.flush())
    return deltas


@settings(max_examples=80, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(0, 4), max_size=5))
def test_streamed_text_equals_decoded_text(text, sizes):
    """Deltas joined are the full decoding, however the ids are grouped, special tokens left out."""
    ids = [*CODEC.encode(text + "<tool> é" + text), 257]
    deltas = stream(CODEC, ids, sizes)
    assert "".join(deltas) == CODEC.decode(ids) == text + "<tool> é" + text
    assert not any(REPLACEMENT in delta for delta in deltas)


def test_encoding_leaves_the_interpreter_to_other_threads():
    """A long prompt is encoded beside the other threads of a server, not instead of them."""
    is_done = threading.Event()
    ticks = []

    def tick():
        while not is_done.wait(0.001):
            ticks.append(None)

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = len(ticks)
    CODEC.encode("word " * 100_000)
    num_ticks = len(ticks) - before
    is_done.set()
    ticker.join()
    assert num_ticks > 10


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(0, 300), max_size=30))
def test_any_ids_stream_without_replacement_characters(ids):
    """Ids that are no text at all lose only the bytes that are no character; unknown ids are silent."""
    deltas = stream(CODEC, ids)
    assert "".join(deltas) == CODEC.decode(ids).replace(REPLACEMENT, "")


@settings(max_examples=40, deadline=None)
@given(text=TEXTS.filter(bool), cut=st.integers(1, 3))
def test_half_a_character_at_the_end_is_dropped(text, cut):
    """A reply that stops inside a character ends before it."""
    ids = CODEC.encode(text + "😀")
    assert "".join(stream(CODEC, ids[:-cut])) == text


def window_codec():
    """A tokenizer whose decoder looks at neighbours, so that its tokens have no bytes of their own."""
    words = ["<unk>", "hello", "##s", "wor", "##ld", "é", "!"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return Codec(
        tokenizer,
        TokenizerSettings(special_tokens={}, templates={}),
        eos_token_ids=frozenset({8}),
        identity="y",
    )


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 8), max_size=40))
def test_other_decoders_stream_what_they_decode_at_once(ids):
    """A tokenizer whose tokens depend on neighbours streams its own full decoding."""
    codec = window_codec()
    assert isinstance(codec.new_decoder(), WindowDecoder)
    assert isinstance(CODEC.new_decoder(), ByteDecoder)
    assert "".join(stream(codec, ids)) == codec.decode(ids)


@pytest.mark.parametrize("make", [byte_tokenizer, window_codec])
def test_token_bytes_joined_are_the_texts_bytes(make):
    """Token by token the bytes of a text; special tokens give their names, unknown ids nothing."""
    made = make()
    codec = made if isinstance(made, Codec) else make_codec(made)
    text = "héllo wörld" if make is byte_tokenizer else "hello world"
    ids = [token_id for token_id in codec.encode(text) if token_id not in codec.eos_token_ids]

    joined = b"".join(codec.token_bytes(token_id) for token_id in ids).decode()
    assert joined.removeprefix("<s>").replace(" ", "").replace("##", "") == text.replace(" ", "")
    assert [codec.token_bytes(token_id) for token_id in codec.eos_token_ids] == [b"</s>"]
    assert codec.token_bytes(10**6) == b""


@pytest.mark.parametrize("make", [byte_tokenizer, window_codec])
def test_shown_tokens_are_text(make):
    """A special token that is asked for appears in decoded and in streamed text; end tokens and others stay hidden."""
    made = make()
    codec = made if isinstance(made, Codec) else make_codec(made)
    (end,) = codec.eos_token_ids
    shown = end - 1
    name = codec.token_bytes(shown).decode()
    assert codec.decode([shown, end]) == "".join(stream(codec, [shown, end])) == ""
    codec.show_tokens([name, codec.token_bytes(end).decode(), "no token"])

    assert codec.decode([shown, end]).strip() == name
    assert "".join(stream(codec, [shown, end])).strip() == name
    assert codec.token_bytes(shown).decode() == name


def test_tokenizer_json_is_the_same_tokenizer():
    """What is handed over builds a tokenizer that encodes alike."""
    tokenizer = byte_tokenizer()
    again = Tokenizer.from_str(make_codec(tokenizer).tokenizer_json())

    assert again.encode("héllo <|user|>").ids == tokenizer.encode("héllo <|user|>").ids


def test_decoders_of_two_rows_do_not_share_state():
    """Half a character in one row shows up in no other row."""
    first, second = CODEC.new_decoder(), CODEC.new_decoder()
    euro = CODEC.encode("€")[1:]
    assert first.push(euro[:2]) == ""
    assert second.push(CODEC.encode("a")) == "a"
    assert first.push(euro[2:]) == "€"


def test_one_start_token_however_it_is_asked_for():
    """The template's, the tokenizer's and the user's own start token never add up to two."""
    assert CODEC.encode("a")[:1] == [256]
    assert CODEC.encode("<s>a") == CODEC.encode("a")
    assert CODEC.prepare_chat([{"role": "user", "content": "a"}]).ids.count(256) == 1
    doubled = make_codec(templates={"default": "{{ bos_token }}" + TEMPLATE})
    assert doubled.prepare_chat([{"role": "user", "content": "a"}]).ids[:3] == [256, 258, CODEC.encode("a")[1]]


@pytest.mark.parametrize(
    ("tail", "expected"),
    [("", False), ("<think>", True), ("<think>\n\n</think>", False), ("</think><think>", True), ("</think>", False)],
)
def test_a_reply_starts_in_reasoning_after_an_open_think(tail, expected):
    """True exactly when the last `<think>` comes after the last `</think>`."""
    prepared = CODEC.prepare_chat([{"role": "user", "content": "a"}], template_kwargs={"tail": tail})
    assert prepared.starts_in_reasoning is expected


def test_rendered_chats_are_what_is_encoded():
    """The text of a chat encodes to its prompt; its start token is not added again, and special tokens have names."""
    text = CODEC.render_chat([{"role": "user", "content": "a"}], template_kwargs={"tail": "!"})
    ids = CODEC.prepare_chat([{"role": "user", "content": "a"}], template_kwargs={"tail": "!"}).ids

    assert text == "<s><|user|>a!"
    assert CODEC.encode(text, add_special_tokens=False) == ids
    assert CODEC.encode("a", add_special_tokens=False) == CODEC.encode("a")[1:]
    assert CODEC.decode(ids, skip_special_tokens=False) == text
    assert CODEC.decode(ids) == "a!"


def test_a_model_without_template_says_so():
    """Chat on a base model is a TemplateError with the way out, and completions still encode."""
    codec = make_codec(templates={})
    assert not codec.has_chat_template
    with pytest.raises(TemplateError, match="raw completions"):
        codec.prepare_chat([{"role": "user", "content": "a"}])
    assert codec.decode(codec.encode("a")) == "a"


def write_gguf(path, template="{{ messages[0].content }}"):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(256)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*alphabet, "<s>", "</s>", "ab"])
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(name="m", path=path, format="gguf")


def write_folder_config(folder):
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    rest = {"num_attention_heads": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(sizes | rest))


@settings(max_examples=20, deadline=None)
@given(text=TEXTS)
def test_written_tokenizer_files_are_the_same_codec(tmp_path_factory, text):
    """A folder written from a GGUF file encodes, decodes, ends and chats as the file does; a copy of it too."""
    origin = write_gguf(tmp_path_factory.mktemp("origin") / "m.gguf")
    codecs = [load_codec(origin)]
    for _ in range(2):
        folder = tmp_path_factory.mktemp("written")
        tokenizer_files(origin, folder)
        write_folder_config(folder)
        origin = ModelSource(name="m", path=folder, format="folder")
        codecs.append(load_codec(origin))
    text += "ab</s>"
    messages = [{"role": "user", "content": text}]
    encoded = [codec.encode(text) for codec in codecs]
    assert encoded[0] == encoded[1] == encoded[2]
    assert {codec.decode(encoded[0]) for codec in codecs} == {text.removesuffix("</s>")}
    assert {codec.eos_token_ids for codec in codecs} == {frozenset({257})}
    assert {tuple(codec.prepare_chat(messages).ids) for codec in codecs} == {tuple(encoded[0])}
    assert codecs[1].identity == codecs[2].identity


def test_identity_tells_tokenizers_apart(tmp_path):
    """Equal files have equal identities; another template is another identity."""
    first, second = write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf")
    other = write_gguf(tmp_path / "c.gguf", template="other")
    assert load_codec(first).identity == load_codec(second).identity != load_codec(other).identity


@pytest.mark.parametrize("place", ["config", "named list", "file", "file over config"])
def test_a_folders_template_is_found_in_each_place(tmp_path, place):
    """The template may be a string or a named list in tokenizer_config.json, or a file, which wins."""
    tokenizer_files(write_gguf(tmp_path / "m.gguf"), tmp_path)
    write_folder_config(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    value = {"config": "right", "named list": [{"name": "default", "template": "right"}]}.get(place, "wrong")
    config["chat_template"] = value if place != "file" else None
    path.write_text(json.dumps(config))
    if place.startswith("file"):
        (tmp_path / "chat_template.jinja").write_text("right")
    codec = load_codec(ModelSource(name="m", path=tmp_path, format="folder"))
    assert codec.decode(codec.prepare_chat([{"role": "user", "content": "x"}]).ids) == "right"
