"""Jump-forward with real weights: a tool call takes at most two thirds of the steps, and is the same call."""

import json
from functools import partial

import jsonschema
import pytest

from headrace_http_api.parsing.families import find_family
from headrace_models import load
from headrace_sampling import GrammarCompiler, GrammarSpec, GrammarTag, SamplingParams, TokenizerFacts
from headrace_scheduling import Engine, EngineConfig, GenerateOptions, GenerationRequest

_PROPERTIES = {
    "get_weather": {"city": {"type": "string", "maxLength": 24}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "create_event": {"title": {"type": "string", "maxLength": 24}, "is_private": {"type": "boolean"}},
}
_SCHEMAS = {
    name: {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    for name, fields in _PROPERTIES.items()
}
_PROMPT = "The user asks for the weather in Paris. The assistant calls a tool:\n"


def _call_spec(names):
    form = find_family("", "hermes").tool_format
    tags = [
        GrammarTag(begin=form.begin(name), content=GrammarSpec.json_schema(_SCHEMAS[name]), end=form.end)
        for name in names
    ]
    return GrammarSpec.structural_tag(tags, triggers=[form.trigger], allows_text=False)


def _replies(requests, compile_grammar, *, jump_forward):
    config = EngineConfig(
        loader=partial(load, "smollm2-135m"),
        prompt_cache_bytes=0,
        compile_grammar=compile_grammar,
        jump_forward=jump_forward,
    )
    with Engine.open_config(config) as engine:
        replies = []
        for request in requests:
            before = engine.status.num_steps
            ((result,),) = engine.run([request])
            replies.append((result.text, result.token_ids, engine.status.num_steps - before))
        return replies


@pytest.mark.model
def test_a_tool_call_saves_a_third_of_its_steps(smollm2):
    """Law: the call of a tool, and a seeded call of one of two, is the same with runs, and sooner done."""
    codec = load(smollm2).codec
    facts = TokenizerFacts(vocab_size=49_152, eos_token_ids=(2,), tokenizer_json=codec.tokenizer_json())
    kinds = ((["get_weather"], SamplingParams()), (list(_SCHEMAS), SamplingParams(temperature=0.8, top_p=0.9, seed=4)))
    requests = [
        GenerationRequest(
            prompt_ids=tuple(codec.encode(_PROMPT)),
            options=GenerateOptions(max_tokens=120, sampling=sampling),
            grammar=_call_spec(names),
        )
        for names, sampling in kinds
    ]
    with GrammarCompiler(facts) as compiler:
        plain, jumping = (
            _replies(requests, lambda loaded, spec: compiler.compile(spec), jump_forward=jumps)
            for jumps in (False, True)
        )
    for (text, token_ids, steps), (same_text, same_ids, fewer) in zip(plain, jumping, strict=True):
        assert (same_text, same_ids) == (text, token_ids)
        assert fewer < steps
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        jsonschema.validate(call["arguments"], _SCHEMAS[call["name"]])
    # White space that the model chooses is not forced, so that chance decides how much the second one saves.
    assert 3 * jumping[0][2] <= 2 * plain[0][2]
