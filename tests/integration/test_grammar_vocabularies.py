"""Grammars on the vocabularies of real models: replies validate, and special tokens stay out of them."""

import json
from pathlib import Path

import jsonschema
import mlx.core as mx
import numpy as np
import pytest

from headrace_models import load, read_config
from headrace_models.gguf_file import read_gguf
from headrace_models.tokenizer import build_tokenizer
from headrace_sampling import (
    BatchSampler,
    GrammarCompiler,
    GrammarSpec,
    SamplingParams,
    TokenizerFacts,
    create_row_sampling,
    make_step_sampler,
    start_masks,
)

SCHEMAS = json.loads((Path(__file__).parents[1] / "sampling" / "grammar_schemas.json").read_text("utf-8"))["supported"]
NAMES = (
    "flat object",
    "tool choice",
    "extraction",
    "tree",
    "unicode keys",
    "format date-time",
    "pattern",
    "number range",
)


def facts_of(source):
    tokenizer = build_tokenizer(read_gguf(source.path).metadata)
    config = read_config(source)
    facts = TokenizerFacts(
        # As if the model's head were padded.
        vocab_size=config.vocab_size + 64,
        eos_token_ids=tuple(config.eos_token_ids),
        tokenizer_json=tokenizer.to_str(),
    )
    return tokenizer, facts


def random_replies(compiler, tokenizer, schemas, seed):
    """Replies of a random model that ever more prefers what ends JSON, eight rows at a time."""
    facts, random = compiler.facts, np.random.default_rng(seed)
    closers = [tokenizer.token_to_id(one) for one in ('"', "}", "]", ",", "0", "1", '"}')]
    closers = [one for one in closers if one is not None] + list(facts.eos_token_ids)
    # What patterns and formats need before they may end.
    leads = [tokenizer.token_to_id(one) for one in "@.a:"]
    rows = [compiler.compile(GrammarSpec.json_schema(schema)) for schema in schemas]
    samplers = [
        create_row_sampling(make_step_sampler(SamplingParams(temperature=float(place % 2), seed=place), mask=row))
        for place, row in enumerate(rows)
    ]
    replies, live, sampler = [[] for _ in rows], list(range(len(rows))), BatchSampler()
    for step in range(600):
        live = [place for place in live if not rows[place].is_terminated]
        if not live:
            break
        start_masks([rows[place] for place in live])
        logits = random.normal(size=(len(live), facts.vocab_size)).astype(np.float32)
        chosen = leads if random.random() < 0.25 else closers
        logits[:, chosen] += random.random((len(live), len(chosen))).astype(np.float32) * min(step, 40)
        tokens = sampler.sample(mx.array(logits), [samplers[place] for place in live]).tokens.tolist()
        for place, token_id in zip(live, tokens, strict=True):
            rows[place].accept(token_id)
            replies[place].append(token_id)
    return replies, live


def check_replies(source, schemas):
    tokenizer, facts = facts_of(source)
    special = {one for one, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    num_unfinished = 0
    with GrammarCompiler(facts) as compiler:
        for start in range(0, len(schemas), 8):
            chosen = schemas[start : start + 8]
            replies, unfinished = random_replies(compiler, tokenizer, chosen, start)
            num_unfinished += len(unfinished)
            for place, (schema, reply) in enumerate(zip(chosen, replies, strict=True)):
                if place in unfinished:
                    continue
                assert reply[-1] in facts.eos_token_ids
                assert not special & set(reply[:-1])
                assert max(reply) < tokenizer.get_vocab_size()
                text = tokenizer.decode(reply[:-1], skip_special_tokens=False)
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    # Chance may keep a reply from its end.
    assert num_unfinished <= len(schemas) // 20


@pytest.mark.model
@pytest.mark.timeout(400)
def test_every_schemas_output_validates_on_the_starter_model(smollm2):
    """On 49,152 real tokens every schema's random replies are valid."""
    check_replies(smollm2, [one["schema"] for one in SCHEMAS])


@pytest.mark.model
@pytest.mark.timeout(400)
def test_output_validates_on_a_large_vocabulary(gemma3_270m):
    """On Gemma's 262,144 tokens, of which bytes and words are spelled in another way, too."""
    check_replies(gemma3_270m, [one["schema"] for one in SCHEMAS if one["name"] in NAMES])


@pytest.mark.model
def test_a_real_model_writes_valid_json(smollm2):
    """A small model that is asked for something else writes an object of the schema, with its own words in it."""
    loaded = load("smollm2-135m")
    _, facts = facts_of(smollm2)
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 30},
            "population": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
            "continent": {"enum": ["Asia", "Europe", "Africa"]},
        },
        "required": ["capital", "population", "continent"],
        "additionalProperties": False,
    }
    with GrammarCompiler(facts) as compiler:
        row = compiler.compile(GrammarSpec.json_schema(schema))
        sampler = make_step_sampler(SamplingParams(), mask=row)
        caches, reply = loaded.model.make_cache(), []
        ids = loaded.codec.encode("The capital of France is Paris. Tell me about France:\n")
        while not row.only_ends and len(reply) < 120:
            hidden = loaded.model.forward_hidden(mx.array([ids]), caches)
            logits = loaded.model.logits_from_hidden(hidden[:, -1:])[:, -1].astype(mx.float32)
            token_id = sampler.sample(logits, len(reply)).item()
            row.accept(token_id)
            reply.append(token_id)
            ids = [token_id]
    answer = json.loads(loaded.codec.decode(reply))

    jsonschema.validate(answer, schema)
    assert answer["capital"].strip()
