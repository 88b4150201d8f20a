"""Models under grammars of every kind: what a real one, or chance, finishes matches; what is cut still could."""

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from functools import partial
from itertools import islice

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve, frozen

from headrace_models import Codec, load
from headrace_sampling import GrammarCompiler, GrammarSpec, GrammarTag, SamplingParams, TokenizerFacts
from headrace_scheduling import Engine, EngineConfig, GenerateOptions, GenerationRequest
from headrace_scheduling.testing import NullModel
from headrace_scheduling.testing.loading import FakeFacts, FakeLoadedModel

EIGHT = ("flat object", "tool call", "extraction", "unicode keys", "format date", "pattern", "oneOf of types", "matrix")
MAX_TOKENS = 96


@frozen(eq=False, kw_only=True)
class Job:
    """A reply to ask for.

    Attributes:
        name: of what it is.
        spec: the grammar.
        check: raises if a finished reply does not match, by other means than the grammar.
        ends_soon: whether its length is bounded.
    """

    name: str
    spec: GrammarSpec
    check: Callable[[str], object]
    temperature: float = 0.0
    seed: int = 0
    ends_soon: bool = True


# ---- what is asked for, and who judges it ----------------------------------------------------------------------------


def exact_number(text):
    try:
        return Decimal(text)
    except InvalidOperation:
        # An exponent of more digits than a Decimal holds.
        return float(text)


def schema_job(one, *, compact=False, is_bounded=True):
    schema = one.bounded if is_bounded else one.schema
    # In binary, 0.07 is no multiple of 0.01.
    exactly = json.loads(json.dumps(schema), parse_float=Decimal)

    def check(text):
        jsonschema.Draft202012Validator(one.schema).validate(json.loads(text))
        jsonschema.Draft202012Validator(exactly).validate(json.loads(text, parse_float=exact_number))

    spec = GrammarSpec.json_schema(schema, compact=compact)
    return Job(name=one.name, spec=spec, check=check, ends_soon=is_bounded and one.unbounded is None)


def alternating(jobs):
    """Every other job at temperature 1."""
    return [evolve(job, temperature=float(place % 2), seed=place) for place, job in enumerate(jobs)]


def matches(pattern, text):
    assert re.fullmatch(pattern, text, re.DOTALL), text


def is_one_of(choices, text):
    assert text in choices


def is_query(text):
    """The database itself runs it."""
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE people (name, age, city)")
        database.execute(text).fetchall()


def is_sum(text):
    assert isinstance(eval(text, {"__builtins__": {}}), int)


def is_list_of_integers(text):
    assert all(str(int(cell)) == cell for cell in text.split(","))


def is_markdown_list(text):
    assert all(line.startswith("- ") and line[2:].strip() for line in text.splitlines())


def has_calls(schema, text):
    assert re.fullmatch(r"(<call>.*?</call>\n?)+", text, re.DOTALL), text
    for call in re.findall(r"<call>(.*?)</call>", text, re.DOTALL):
        jsonschema.validate(json.loads(call), schema)


# Without \d: the tables of Unicode differ between engines.
REGEXES = {
    "a date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "a phone number": r"\+[1-9][0-9]{0,2}( [0-9]{2,4}){2,3}",
    "an e-mail address": r"[a-z0-9]{1,12}(\.[a-z0-9]{1,12})?@[a-z]{2,12}\.(com|org|net)",
    "a version": r"(0|[1-9][0-9]{0,2})(\.(0|[1-9][0-9]{0,2})){2}(-(alpha|beta)\.[0-9])?",
    "a colour": r"#[0-9A-F]{6}",
    "one sentence": r"[A-Z][a-z]{0,12}( [a-z]{1,12}){2,9}\.",
    "anything in quotes": r'"[^"\n]{1,40}"',
    "a German word": r"[A-ZÄÖÜ][a-zäöüß]{2,12}",
    "an answer": r"(Answer: )?\(?[A-D]\)?",
    "a path": r"(/[a-z0-9_-]{1,12}){1,4}(\.(py|txt|md))?",
}
CHOICES = {
    "a mood": ("positive", "negative", "neutral"),
    "consent": ("yes", "yes, please", "no", "no, thank you"),
    "a number": tuple(map(str, range(1, 101))),
    "a sign": ("🙂", "🙁", "日本", "é"),
    "code": ('print("hi")', "a = 'b\\n'", "if x:\n    pass"),
}
CALL = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
GRAMMARS = {
    "a query": (
        GrammarSpec.lark(
            'start: "SELECT " columns " FROM people" (" WHERE " test (" AND " test)?)? (" LIMIT " NUMBER)?\n'
            'columns: "*" | column ("," column){0,2}\n'
            'column: "name" | "age" | "city"\n'
            'test: "age " ("<" | ">" | "=") " " NUMBER | "city = " TEXT\n'
            "NUMBER: /[1-9][0-9]{0,2}/\n"
            "TEXT: /'[A-Za-z ]{1,12}'/"
        ),
        is_query,
    ),
    "a sum": (
        GrammarSpec.lark('start: t ("+" t){1,3}\nt: f ("*" f)?\nf: /[1-9][0-9]{0,2}/ | "(" f "+" f ")"'),
        is_sum,
    ),
    "a list of numbers": (GrammarSpec.lark('start: n ("," n){0,7}\nn: /0|[1-9][0-9]{0,3}/'), is_list_of_integers),
    "a JSON value in Lark": (
        GrammarSpec.lark(f'start: "json: " %json {json.dumps(CALL)}'),
        lambda text: jsonschema.validate(json.loads(text.removeprefix("json: ")), CALL),
    ),
    "a list in EBNF": (
        GrammarSpec.ebnf('root ::= item item? item?\nitem ::= "- " [a-z] [a-z ]{0,20} "\\n"'),
        is_markdown_list,
    ),
    "a sum in EBNF": (GrammarSpec.ebnf('root ::= n "+" n ("+" n)?\nn ::= [1-9] [0-9]? [0-9]?'), is_sum),
    "a call": (
        GrammarSpec.structural_tag(
            [GrammarTag(begin="<call>", content=GrammarSpec.json_schema(CALL), end="</call>")], allows_text=False
        ),
        partial(has_calls, CALL),
    ),
}


def other_jobs():
    """Regular expressions, choices, and grammars in Lark and EBNF."""
    regexes = [
        Job(name=name, spec=GrammarSpec.regex(pattern), check=partial(matches, pattern))
        for name, pattern in REGEXES.items()
    ]
    choices = [
        Job(name=name, spec=GrammarSpec.choice(texts), check=partial(is_one_of, texts))
        for name, texts in CHOICES.items()
    ]
    grammars = [Job(name=name, spec=spec, check=check) for name, (spec, check) in GRAMMARS.items()]
    return [*regexes, *choices, *grammars]


# ---- running them ----------------------------------------------------------------------------------------------------


class ChanceModel(NullModel):
    """Says something else at every step, whatever came before."""

    num_steps = 0

    def logits_from_hidden(self, hidden):
        self.num_steps += 1
        return mx.random.normal((*hidden.shape[:2], self.config.vocab_size), key=mx.random.key(self.num_steps))


@frozen(eq=False)
class Bench:
    """The engine under test, and what else replies are judged with."""

    engine: Engine
    codec: Codec
    compiler: GrammarCompiler


@contextmanager
def open_bench(codec, loader):
    facts = TokenizerFacts(vocab_size=49_152, eos_token_ids=(2,), tokenizer_json=codec.tokenizer_json())
    with GrammarCompiler(facts) as compiler:
        config = EngineConfig(
            loader=loader,
            max_rows=8,
            prompt_cache_bytes=0,
            compile_grammar=lambda loaded, spec: compiler.compile(spec),
        )
        with Engine.open_config(config) as engine:
            yield Bench(engine, codec, compiler)


@pytest.fixture(scope="module")
def codec(smollm2):
    return load(smollm2).codec


@pytest.fixture(scope="module")
def starter(codec):
    """The starter model."""
    with open_bench(codec, partial(load, "smollm2-135m")) as bench:
        yield bench


@pytest.fixture
def chance(codec):
    """A model without sense that has the starter model's vocabulary."""
    facts = FakeFacts(vocab_size=49_152, eos_token_ids=frozenset({2}))
    with open_bench(codec, lambda: FakeLoadedModel(model=ChanceModel(facts), codec=codec)) as bench:
        yield bench


def request_of(codec, job):
    return GenerationRequest(
        prompt_ids=tuple(codec.encode(f"An example of {job.name}:\n")),
        options=GenerateOptions(
            max_tokens=MAX_TOKENS, sampling=SamplingParams(temperature=job.temperature, seed=job.seed)
        ),
        grammar=job.spec,
    )


def free_request(codec, seed):
    return GenerationRequest(
        prompt_ids=tuple(codec.encode("Once upon a time")),
        options=GenerateOptions(max_tokens=40, sampling=SamplingParams(temperature=0.8, seed=seed)),
    )


def complete(bench, job, token_ids):
    """Lead a reply that was cut to an end, as its grammar allows; return the whole text."""
    row, random = bench.compiler.compile(job.spec), np.random.default_rng(job.seed)
    for token_id in token_ids:
        row.accept(token_id)
    # A number is among them: where only that or "(" goes on, choices of chance would open more than they close.
    texts = ('"', "}", "]", "'", ")", ".", "\n", "@", ":", "null", "0", "1", "a")
    closers = [bench.codec.encode(text)[0] for text in texts]
    added = []
    while not row.is_satisfied:
        assert len(added) < 2000, f"nothing ends {job.name}"
        words = row.mask_words()
        is_open = np.unpackbits(words.view(np.uint8), bitorder="little")
        good = [one for one in closers if is_open[one]]
        ids = good if good and random.random() < 0.9 else np.flatnonzero(is_open)
        added.append(int(random.choice(ids)))
        row.accept(added[-1])
    return bench.codec.decode([*token_ids, *added])


def check_replies(bench, jobs, num_bound=6):
    """Run jobs, so many to a batch beside two free rows, or alone; return those that did not finish.

    A finished reply matches. One that is cut is the beginning of one that matches.
    """
    unfinished, left = [], iter(jobs)
    while batch := list(islice(left, num_bound)):
        requests = [request_of(bench.codec, job) for job in batch]
        if num_bound > 1:
            requests[len(requests) // 2 : len(requests) // 2] = [free_request(bench.codec, seed) for seed in (1, 2)]
        replies = zip(requests, bench.engine.run(requests), strict=True)
        results = [result for request, (result,) in replies if request.grammar is not None]
        for job, result in zip(batch, results, strict=True):
            if result.finished.reason == "stop":
                job.check(result.text)
            else:
                assert result.finished.reason == "length"
                assert len(result.token_ids) == MAX_TOKENS
                job.check(complete(bench, job, result.token_ids))
                unfinished.append(job)
    return unfinished


def check_ends(jobs, unfinished):
    """Of the jobs that bound their replies, at least 95 % finish within 96 tokens."""
    num_bounded = sum(job.ends_soon for job in jobs)
    late = [job.name for job in unfinished if job.ends_soon]
    print(f"\n{len(jobs)} replies, {len(unfinished)} unfinished; of {num_bounded} with bounds {len(late)}: {late}")
    assert len(late) <= 0.05 * num_bounded, late


def whole_product(kind, schemas, temperature):
    """Each schema: without white space, with it, and without bounds; or each other grammar."""
    if kind == "others":
        jobs = other_jobs()
    else:
        jobs = [schema_job(one, compact=kind == "compact", is_bounded=kind != "unbounded") for one in schemas]
    return [evolve(job, temperature=temperature, seed=place) for place, job in enumerate(jobs)]


KINDS = ("compact", "spaced", "unbounded", "others")


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_chance_under_the_whole_product(chance, tabled_schemas, temperature, kind):
    """Law: every finished reply matches, in batches of eight with free rows among them, and what is cut could still."""
    jobs = whole_product(kind, tabled_schemas, temperature)
    check_ends(jobs, check_replies(chance, jobs))


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_starter_model_writes_valid_values_of_all_schemas(starter, tabled_schemas):
    """Law: the same, greedy and at temperature 1, with and without white space between tokens; and alone."""
    jobs = alternating(schema_job(one, compact=place % 12 < 6) for place, one in enumerate(tabled_schemas))
    check_ends(jobs, check_replies(starter, jobs))
    alone = [schema_job(one, compact=True) for one in tabled_schemas if one.name in EIGHT]
    assert len(alone) == len(EIGHT)
    assert not check_replies(starter, alone, num_bound=1)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_starter_model_follows_other_grammars(starter):
    """Law: the same for regular expressions, choices, Lark, EBNF and tags, all kinds in one batch."""
    jobs = alternating(other_jobs())
    jobs = [job for start in range(4) for job in jobs[start::4]]
    check_ends(jobs, check_replies(starter, jobs))


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_bound", [1, 6], ids=["alone", "batched"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_starter_model_under_the_whole_product(starter, tabled_schemas, temperature, num_bound, kind):
    """The same for each schema and grammar at each temperature, alone and in batches."""
    jobs = whole_product(kind, tabled_schemas, temperature)
    check_ends(jobs, check_replies(starter, jobs, num_bound=num_bound))
