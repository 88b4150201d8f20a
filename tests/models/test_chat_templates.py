"""Conversations through templates of many families: rendering, the stable boundary, and prompts that keep their prefix.

The starter model's template is the real one, from its GGUF file. The files in `templates` are own minimal fixtures that
have the traits of their families' templates.
"""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace_models.codec import Codec, load_codec
from headrace_models.errors import TemplateError
from headrace_models.sources import resolve
from headrace_models.tokenizer_settings import TokenizerSettings

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
PARAMETERS = {"properties": {"city": {"enum": ["Bonn"]}, "days": {"items": {"minimum": 1}}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
CHAT = [{"role": "user", "content": "ab"}]
WITH_TOOLS = ["llama3", "qwen3", "mistral", "hermes"]
WORDS = st.text(alphabet="ab é€\n", min_size=1, max_size=8).map(str.strip).filter(bool)


def make_codec(template):
    """A codec of bytes and some merged tokens, so that a text can be spelled in several ways."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: token_id for token_id, token in enumerate([*alphabet, "ab", "abab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "ab")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokens = TokenizerSettings(
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, templates={"default": template}
    )
    return Codec(tokenizer, tokens, eos_token_ids=frozenset({257 + 3}), identity="x")


def spell(codec, text, seed):
    """Spell a text as a model might: some parts as the tokenizer does, some byte by byte."""
    rng = random.Random(seed)
    return [
        token_id
        for part in codec._encode_prompt(text)
        for token_id in (
            [codec._tokenizer.token_to_id(c) for c in codec._tokenizer.id_to_token(part)]
            if rng.random() < 0.5 and part < 258
            else [part]
        )
    ]


def text_of(codec, prompt):
    return codec._decode_raw(prompt.ids)


@pytest.fixture(scope="module")
def starter():
    return load_codec(resolve("smollm2-135m"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_renders_with_every_text_in_order(name):
    """System, user and assistant texts all reach the prompt in their order, and it is open for a reply."""
    turns = [("developer", "one"), ("user", "two"), ("assistant", "three"), ("user", "four")]
    codec = make_codec(TEMPLATES[name])
    prompt = codec.prepare_chat([{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns])
    rendered = text_of(codec, prompt)
    places = [rendered.rindex(text) for _, text in turns]
    assert places == sorted(places)
    assert rendered.count("<s>") <= 1
    assert 0 < prompt.stable_boundary <= len(prompt.ids)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_calls_and_results_render(name):
    """Tools without types, a call with its arguments as text, and the result of it all reach the prompt."""
    codec = make_codec(TEMPLATES[name])
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [
        *CHAT,
        call,
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": "so"},
    ]
    rendered = text_of(codec, codec.prepare_chat(messages, tools=TOOLS))
    assert "weather" in rendered
    assert '{"city": "Bonn"}' in rendered
    assert rendered.index("Bonn") < rendered.rindex("sunny") < rendered.rindex("so")
    if name == "hermes":
        assert "weather(city: str, days: list[int])" in rendered.replace("float", "int")


@pytest.mark.parametrize(
    ("name", "options", "tail", "starts"),
    [
        ("qwen3", {}, "<|im_start|>assistant\n", False),
        ("qwen3", {"template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n", False),
        ("qwen3", {"reasoning_effort": "none"}, "<think>\n\n</think>\n\n", False),
        ("smollm3", {"reasoning_effort": "high"}, "<|im_start|>assistant\n", False),
        ("smollm3", {"reasoning_effort": "none"}, "<think>\n\n</think>\n", False),
        ("minicpm", {}, "</think>\n\n", False),
        ("minicpm", {"reasoning_effort": "low"}, "<think>\n", True),
        ("minicpm", {"reasoning_effort": "low", "template_kwargs": {"enable_thinking": False}}, "</think>\n\n", False),
    ],
)
def test_reasoning_switches_reach_the_template(name, options, tail, starts):
    """Switch and effort decide how the reply opens, and the prompt tells whether it opens inside the reasoning."""
    codec = make_codec(TEMPLATES[name])
    prompt = codec.prepare_chat(CHAT, **options)
    assert text_of(codec, prompt).endswith(tail)
    assert prompt.starts_in_reasoning is starts


def test_granite_is_told_under_its_own_name():
    """enable_thinking sets the variable that Granite calls thinking."""
    codec = make_codec(TEMPLATES["granite"])
    rendered = text_of(codec, codec.prepare_chat(CHAT, template_kwargs={"enable_thinking": True}))
    assert "Write your thoughts first." in rendered


def test_a_template_that_wants_turns_to_alternate_refuses_others():
    """Gemma's refusal reaches the caller, and does not disturb the probe of proper conversations."""
    codec = make_codec(TEMPLATES["gemma3"])
    with pytest.raises(TemplateError, match="must alternate"):
        codec.prepare_chat([*CHAT, *CHAT])
    assert codec.prepare_chat(CHAT).stable_boundary == len(codec.prepare_chat(CHAT).ids)


@pytest.mark.parametrize(
    ("name", "options", "dropped"),
    [
        ("llama3", {}, ""),
        ("llama3", {"tools": TOOLS}, ""),
        ("qwen3", {}, ""),
        ("qwen3", {"template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n"),
        ("qwen3", {"tools": TOOLS, "template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n"),
        ("smollm3", {"reasoning_effort": "none"}, ""),
        ("gemma4", {}, "<|channel>thought\n<channel|>"),
        ("gemma4", {"template_kwargs": {"enable_thinking": True}}, ""),
        ("minicpm", {}, "<think>\n\n</think>\n\n"),
        ("minicpm", {"reasoning_effort": "low"}, "<think>\n"),
    ],
)
def test_the_boundary_ends_before_what_the_next_turn_drops(name, options, dropped):
    """Invariant 26: an opening that earlier replies do not keep lies behind the boundary, all else before it."""
    codec = make_codec(TEMPLATES[name])
    prompt = codec.prepare_chat(CHAT, **options)
    assert codec._decode_raw(prompt.ids[prompt.stable_boundary :]) == dropped


def check_conversation(codec, turns, seed, **options):
    """Hold a conversation, resending everything each time; return the last prompt's ids and its tokens in the cache."""
    messages = []
    fed = []
    boundary = 0
    for number, (question, reply) in enumerate(turns):
        messages.append({"role": "user", "content": question})
        prompt = codec.prepare_chat(messages, **options)
        assert prompt.ids[:boundary] == fed[:boundary], f"turn {number} lost the stable prefix"
        boundary = prompt.stable_boundary
        if boundary == len(prompt.ids) and fed:
            assert prompt.ids[: len(fed)] == fed, f"turn {number} lost the generated reply"
        fed = [*prompt.ids, *spell(codec, reply, seed + number)]
        codec.remember(fed)
        messages.append({"role": "assistant", "content": reply})


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=5, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=20, max_size=20), seed=st.integers(0, 999))
def test_a_resent_conversation_keeps_its_prefix(name, turns, seed):
    """Over 20 turns each prompt starts with the last one up to its boundary; where that is its whole length, also with
    the reply's ids as they were generated, however they spelled it.
    """
    check_conversation(make_codec(TEMPLATES[name]), turns, seed)


@settings(max_examples=5, deadline=None)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=20, max_size=20), seed=st.integers(0, 999))
def test_a_resent_conversation_keeps_its_prefix_when_thinking_is_off(turns, seed):
    """The same where the template drops its empty thoughts from earlier replies."""
    check_conversation(make_codec(TEMPLATES["qwen3"]), turns, seed, reasoning_effort="none")


def test_the_starter_models_conversation_keeps_its_prefix(starter):
    """The same for the real template and tokenizer, with replies spelled letter by letter."""
    messages, fed = [], []
    for number in range(20):
        messages.append({"role": "user", "content": f"Question {number}: what is a weir?"})
        prompt = starter.prepare_chat(messages)
        assert prompt.ids[: len(fed)] == fed
        assert prompt.stable_boundary == len(prompt.ids)
        reply = f"It is a low dam, number {number}."
        fed = [*prompt.ids, *(starter.encode(letter)[0] for letter in reply)]
        assert starter.decode(fed[len(prompt.ids) :]) == reply
        starter.remember(fed)
        messages.append({"role": "assistant", "content": reply})
