"""Metered templates against transformers' own rendering: a real template that a package carries, and all fixtures."""

import ast
import importlib.util
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from headrace_models import ChatTemplate

FIXTURES = sorted((Path(__file__).parents[1] / "models" / "templates").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells <it> & more.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": {"city": "Bonn", "days": [1, 2]}}}
TURNS = [
    {"role": "user", "content": "  Größe? <think> & {{ 1 }}\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nAnswer | one"},
    {"role": "user", "content": "and " * 200},
]
CHATS = {
    "one": TURNS[:1],
    "three": TURNS,
    "system": [{"role": "system", "content": "Be brief. /no_think"}, *TURNS],
    "call": [*TURNS, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
}
OPTIONS = [{}, {"enable_thinking": False}, {"enable_thinking": True, "thinking": True}]


@pytest.fixture(scope="module")
def oracle():
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def package_template():
    """SmolVLM's template, read from the source text of transformers, since the module itself wants more packages."""
    spec = importlib.util.find_spec("transformers")
    text = (Path(spec.origin).parent / "models" / "smolvlm" / "processing_smolvlm.py").read_text()
    (value,) = (
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEFAULT_CHAT_TEMPLATE"
    )
    return next(node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and "{%" in str(node.value))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_templates_render_as_in_transformers(oracle, path, chat, options):
    """Every fixture renders every conversation, with and without tools, as transformers does."""
    source = path.read_text()
    ours = ChatTemplate({"default": source}, SPECIAL)
    for tools in (None, TOOLS):
        expected = oracle.apply_chat_template(
            chat, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True, **options
        )
        assert ours.render(chat, template_kwargs={"tools": tools, **options}) == expected


def test_a_real_template_for_images_renders_as_in_transformers(oracle):
    """Arrays with images reach a template that reads them; arrays of text alone are the text."""
    source = package_template()
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A weir."}]
    ours = ChatTemplate({"default": source}, SPECIAL)
    expected = oracle.apply_chat_template(chat, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert "<image>" in expected
    assert ours.render(chat) == expected
