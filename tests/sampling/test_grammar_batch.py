"""Grammars in batches: whatever a model says, what is finished matches; rows without a grammar do not notice."""

import datetime as dt
import json
import re
import urllib.parse
from itertools import count
from pathlib import Path

import jsonschema
import mlx.core as mx
import numpy as np
import pytest

from headrace_sampling import (
    BatchSampler,
    GrammarSpec,
    GrammarTag,
    InvalidSamplingParams,
    SamplingParams,
    TokenNotAllowed,
    create_row_sampling,
    make_step_sampler,
    start_masks,
)
from headrace_sampling.bitmask import close_tokens

EOS, TURN_END, THINK_END = 256, 257, 258
ENDS = {EOS, TURN_END}
DATA = json.loads(Path(__file__).with_name("grammar_schemas.json").read_text("utf-8"))
MAX_STEPS = 400
# Tokens that close what is open, or lead there, become ever more likely, so that replies end.
CLOSERS = [*b'"}],', EOS, THINK_END]
LEADS = list(b"@.a0")


class Row:
    """One row, driven as a scheduler drives it: accept, start masks, forward, sample."""

    def __init__(self, spec, compiler, seed, closers=CLOSERS, **params):
        self.spec = spec
        self.closers = list(closers)
        self.grammar = None if spec is None else compiler.compile(spec)
        sampler = make_step_sampler(SamplingParams(seed=seed, **params), eos_token_ids=ENDS, mask=self.grammar)
        self.sampling = create_row_sampling(sampler)
        self.random = np.random.default_rng(seed)
        self.tokens = []

    @property
    def is_over(self):
        return self.grammar.is_terminated if self.grammar is not None else len(self.tokens) >= 20

    def logits(self, vocab_size):
        """What a model without sense says: random, some of it infinite, and nothing of it known beforehand."""
        logits = self.random.normal(size=vocab_size).astype(np.float32) * 3
        logits[self.random.integers(vocab_size, size=8)] = 40
        if self.grammar is not None:
            chosen = LEADS if self.random.random() < 0.25 else self.closers
            logits[chosen] += len(self.tokens) / 2
        return logits

    def take(self, token_id):
        self.tokens.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)


def run(rows, vocab_size, dtype=mx.float32):
    """Run rows as one batch until all are over; rows leave when they end."""
    sampler = BatchSampler()
    for _ in range(MAX_STEPS):
        live = [row for row in rows if not row.is_over]
        if not live:
            return
        start_masks([row.grammar for row in live if row.grammar is not None])
        logits = mx.array(np.stack([row.logits(vocab_size) for row in live])).astype(dtype)
        tokens = sampler.sample(logits, [row.sampling for row in live]).tokens.tolist()
        for row, token_id in zip(live, tokens, strict=True):
            row.take(token_id)


def text_of(row, facts):
    """The reply's text; special tokens would show."""
    assert row.tokens[-1] in ENDS
    return b"".join(facts.tokens[one] for one in row.tokens[:-1]).decode("utf-8")


def batches(specs, compiler, temperature):
    """Six rows with grammars and two free ones at a time."""
    seeds = count(1000)
    for start in range(0, len(specs), 6):
        yield [
            *(Row(spec, compiler, next(seeds), temperature=temperature) for spec in specs[start : start + 3]),
            Row(None, compiler, next(seeds), temperature=temperature),
            *(Row(spec, compiler, next(seeds), temperature=temperature) for spec in specs[start + 3 : start + 6]),
            Row(None, compiler, next(seeds), temperature=1.0, repetition_penalty=1.2),
        ]


def check_all(specs, compiler, temperature, check):
    for rows in batches(specs, compiler, temperature):
        run(rows, compiler.facts.vocab_size)
        for row in rows:
            if row.spec is not None:
                assert row.is_over, (row.spec, b"".join(compiler.facts.tokens[one] for one in row.tokens))
                check(row.spec, text_of(row, compiler.facts))


FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def without_leap(value):
    """RFC 3339 has small letters, the year 0 and leap seconds; Python has none of them."""
    return re.sub("^0000", "0001", value.upper().replace(":60", ":59"))


@FORMATS.checks("date", ValueError)
def is_date(value):
    return bool(dt.date.fromisoformat(without_leap(value)))


# What the library checks only with further packages.
@FORMATS.checks("time", ValueError)
def is_time(value):
    return dt.time.fromisoformat(without_leap(value)).tzinfo is not None


@FORMATS.checks("date-time", ValueError)
def is_date_time(value):
    return dt.datetime.fromisoformat(without_leap(value)).tzinfo is not None


@FORMATS.checks("duration")
def is_duration(value):
    return re.fullmatch(r"P(?!$)(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?", value) is not None


@FORMATS.checks("uri", ValueError)
def is_uri(value):
    return bool(urllib.parse.urlsplit(value).scheme)


@FORMATS.checks("hostname")
def is_hostname(value):
    return len(value) <= 253 and all(re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", one) for one in value.split("."))


def validate(schema, text):
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_schemas_output_validates(compiler, temperature):
    """Every reply of a random model under each schema ends and is valid, in batches of eight with free rows."""
    schemas = {GrammarSpec.json_schema(entry["schema"]): entry["schema"] for entry in DATA["supported"]}

    check_all(list(schemas), compiler, temperature, lambda spec, text: validate(schemas[spec], text))


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20))
def test_every_schemas_output_validates_many_times(compiler, seed):
    """The same for many random models, compact too."""
    schemas = {
        GrammarSpec.json_schema(one["schema"], compact=seed % 2 == 1): one["schema"] for one in DATA["supported"]
    }
    specs = list(schemas)
    np.random.default_rng(seed).shuffle(specs)
    for rotation in range(3):
        check_all(
            specs[seed + rotation :] + specs[: seed + rotation], compiler, 1.0, lambda s, t: validate(schemas[s], t)
        )


def test_the_validator_is_not_asleep():
    """The oracle of the law above refuses what breaks a schema."""
    for schema, text in (
        ({"type": "string", "format": "date"}, '"2024-13-01"'),
        ({"type": "string", "format": "time"}, '"10:00"'),
        ({"type": "string", "format": "duration"}, '"P"'),
        ({"type": "string", "format": "uuid"}, '"12"'),
        ({"type": "string", "format": "email"}, '"a"'),
        ({"type": "string", "format": "hostname"}, '"-a"'),
        ({"type": "string", "format": "uri"}, '"a b"'),
        ({"type": "integer", "minimum": 3}, "2"),
        ({"type": "object", "additionalProperties": False}, '{"a": 1}'),
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate(schema, text)


def test_every_character_of_a_constant_is_written(compiler):
    """Constants and keys come back as they are, for one character of every kind that a schema may hold."""
    characters = [*map(chr, range(0x20, 0x7F)), *"\b\f\n\r\té\x80\xa0\u2028日🙂\U0010ffff\ue000\ufeff"]
    text = "".join(characters)
    specs = [
        GrammarSpec.json_schema({"const": text}),
        GrammarSpec.json_schema({"enum": [[text, {text: 1.5}]]}, compact=True),
        GrammarSpec.json_schema(
            {"type": "object", "properties": {text: {"const": None}}, "required": [text], "additionalProperties": False}
        ),
    ]
    expected = dict(zip(specs, (text, [text, {text: 1.5}], {text: None}), strict=True))

    def check(spec, reply):
        assert json.loads(reply) == expected[spec]

    check_all(specs, compiler, 1.0, check)


@pytest.mark.parametrize("key", ["\\u0061", "a\\/b", "\\u0061\\/b"])
def test_no_key_is_a_known_one_in_disguise(compiler, key):
    """An open object takes no key whose escapes spell a known property, whose value would be unchecked."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "a/b": {"type": "integer"}}}
    row = compiler.compile(GrammarSpec.json_schema(schema))
    reply = f'{{"{key}": "x"}}'

    def say():
        for byte in reply.encode():
            row.accept(byte)

    assert json.loads(reply)
    with pytest.raises(TokenNotAllowed):
        say()


REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no|maybe)( please)?",
    r"#[0-9a-f]{6}",
    r"[A-Z][a-z]{1,6}( [A-Z][a-z]{1,6}){1,2}",
    r"https?://[a-z]{1,8}\.(com|org)(/[a-z0-9]{1,5}){0,2}",
    r"é|ö|日本|🙂{2}",
    r"\d{4}-(0[1-9]|1[0-2])",
    r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?",
    r"\w{2,5}\s\S{2}",
    r"(a|b){5,9}",
    r"x?",
    r"[^<>]{0,9}<br/>",
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_regexs_output_matches(compiler, temperature):
    """The same for regular expressions, with Python's own engine as the oracle."""

    def check(spec, text):
        assert re.fullmatch(spec.text, text, re.DOTALL), text

    check_all([GrammarSpec.regex(pattern) for pattern in REGEXES], compiler, temperature, check)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_choice_is_one_of_them(compiler, temperature):
    """The same for choices: also those that start others, need escapes, or share bytes."""
    specs = [
        GrammarSpec.choice(choices)
        for choices in (
            ["yes", "no"],
            ["a", "ab", "abc"],
            ['say "hi"', "back\\slash", "line\nbreak"],
            ["日本", "日", "🙂", "é"],
            [f"option {number}" for number in range(200)],
            ["<|end|>", "</think>"],
        )
    ]

    def check(spec, text):
        assert text in spec.choices

    check_all(specs, compiler, temperature, check)


def csv_of_integers(text):
    assert all(str(int(cell)) == cell for cell in text.split(","))


def arithmetic(text):
    assert re.fullmatch(r"[0-9+*()]+", text)
    compile(re.sub(r"\b0+(?=\d)", "", text), "reply", "eval")


def balanced(text):
    assert set(text) <= {"(", ")"}
    depth = 0
    for letter in text:
        depth += 1 if letter == "(" else -1
        assert depth >= 0
    assert depth == 0


GRAMMARS = [
    (GrammarSpec.lark('start: n ("," n){0,5}\nn: /0|[1-9][0-9]{0,3}/'), csv_of_integers),
    (GrammarSpec.lark('start: t ("+" t){0,2}\nt: f ("*" f){0,1}\nf: /[0-9]{1,3}/ | "(" f "+" f ")"'), arithmetic),
    (GrammarSpec.lark('start: p{1,3}\np: "()" | "(" p ")"'), balanced),
    (GrammarSpec.lark('start: %json {"type": "array", "items": {"type": "integer"}, "maxItems": 3}'), json.loads),
    (GrammarSpec.ebnf('root ::= p p?\np ::= "()" | "(" p ")"'), balanced),
    (GrammarSpec.ebnf('root ::= n ("," n)? \nn ::= "0" | [1-9] [0-9]?'), csv_of_integers),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_grammars_output_parses(compiler, temperature):
    """The same for Lark and GBNF grammars, recursion included."""
    checks = dict(GRAMMARS)

    check_all(list(checks), compiler, temperature, lambda spec, text: checks[spec](text))


def test_tool_calls_in_free_text_validate(compiler, facts):
    """Every call that a random model makes in free text has valid arguments, and a required one is made."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rom", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tag = GrammarTag(begin="<f=weather>", content=GrammarSpec.json_schema(schema), end="</f>")
    spec = GrammarSpec.structural_tag([tag], triggers=["<f="], is_required=True)
    closers = [facts.tokens.index(b"<f="), ord('"'), EOS, TURN_END]
    rows = [Row(spec, compiler, seed, closers, temperature=1.0) for seed in range(8)]
    run(rows, facts.vocab_size)

    for row in rows:
        calls = re.findall(r"<f=weather>(.*?)</f>", text_of(row, facts), re.DOTALL)
        assert calls
        assert text_of(row, facts).count("<f=") == len(calls)
        for call in calls:
            validate(schema, call)


def test_reasoning_is_free_and_the_answer_is_not(compiler, facts):
    """Free text of any kind comes before the marker, and exactly the grammar's text after it."""
    for marker in ("</think>", (THINK_END,)):
        spec = GrammarSpec.json_object(free_until=marker)
        rows = [Row(spec, compiler, seed, temperature=1.0) for seed in range(6)]
        run(rows, facts.vocab_size)
        for row in rows:
            assert row.tokens[-1] in ENDS
            pieces = [facts.tokens[one] for one in row.tokens[:-1]]
            # Spelled by other tokens, the text is no marker where a token is.
            place = row.tokens.index(THINK_END) + 1 if isinstance(marker, tuple) else first_end(pieces, marker.encode())
            assert place > 1
            assert isinstance(json.loads(b"".join(pieces[place:])), dict)


def first_end(pieces, marker):
    """How many pieces there are up to the one that completes the marker."""
    return next(end for end in range(len(pieces)) if marker in b"".join(pieces[:end]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_free_rows_do_not_notice(compiler, facts, dtype):
    """Rows without a grammar get bit for bit the tokens and log-probabilities that they get without others."""
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 2}]

    def free_rows():
        return [create_row_sampling(make_step_sampler(SamplingParams(seed=5, **kind))) for kind in kinds]

    def bound_row():
        mask = compiler.compile(GrammarSpec.regex("[a-z]{20}"))
        return create_row_sampling(
            make_step_sampler(SamplingParams(temperature=1.0, seed=9, presence_penalty=1), mask=mask)
        )

    alone, mixed, bound = free_rows(), free_rows(), [bound_row(), bound_row()]
    first, second = BatchSampler(), BatchSampler()
    for seed in range(6):
        logits = mx.random.normal((5, facts.vocab_size), key=mx.random.key(seed)).astype(dtype) * 4
        expected = first.sample(logits[mx.array([1, 2, 4])], alone)
        together = second.sample(logits, [bound[0], mixed[0], mixed[1], bound[1], mixed[2]])
        assert together.tokens[mx.array([1, 2, 4])].tolist() == expected.tokens.tolist()
        assert together.logprobs.row(4) == expected.logprobs.row(2)
        for row, place in zip(bound, (0, 3), strict=True):
            row.sampler.setup.mask.accept(together.tokens[place].item())


def test_a_batch_equals_its_rows_alone(compiler, facts):
    """Rows with grammars, parameters of all kinds and log-probabilities get the same token in a batch and alone."""
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5, "logprobs": 3},
        {"temperature": 2.0, "min_p": 0.1},
    ]
    specs = [
        GrammarSpec.json_object(),
        GrammarSpec.regex("[a-z]{9}"),
        GrammarSpec.json_schema(True),
        GrammarSpec.choice(["aa", "ab"]),
    ]
    rows = [Row(spec, compiler, 3, **kind) for spec, kind in zip(specs, kinds, strict=True)]
    sampler = BatchSampler()
    for step in range(2):
        logits = mx.random.normal((4, facts.vocab_size), key=mx.random.key(step)) * 3
        alone = [row.sampling.sampler.sample(logits[place : place + 1], step).item() for place, row in enumerate(rows)]
        together = sampler.sample(logits, [row.sampling for row in rows]).tokens.tolist()
        assert together == alone
        for row, token_id in zip(rows, together, strict=True):
            row.take(token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_bias_opens_what_the_grammar_closes(compiler, facts, temperature):
    """A huge bias or logit of a closed token picks nothing, and the mask comes after the processors."""
    bias = {ord("x"): 1e30, EOS: 1e30}
    mask = compiler.compile(GrammarSpec.regex("[ab]{4}"))
    params = SamplingParams(temperature=temperature, seed=1, logit_bias=bias, top_p=0.5, logprobs=5)
    row = create_row_sampling(make_step_sampler(params, eos_token_ids=ENDS, mask=mask))
    logits = mx.zeros((1, facts.vocab_size))
    logits[0, ord("y")] = mx.inf
    sampler = BatchSampler()
    for _ in range(4):
        step = sampler.sample(logits, [row])
        (token_id,) = step.tokens.tolist()
        assert token_id in b"ab"
        entry = step.logprobs.row(0)
        assert entry.logprob == pytest.approx(np.log(0.5), abs=1e-6)
        assert {one for one, logprob in entry.top if logprob > -np.inf} == set(b"ab")
        mask.accept(token_id)
    assert sampler.sample(logits, [row]).tokens.tolist() == [EOS]


def test_a_complete_grammar_beats_the_minimum_length(compiler, facts):
    """`min_tokens` closes EOS while the grammar has anything else, and gives way when it has not."""
    mask = compiler.compile(GrammarSpec.regex("ab?"))
    sampler = make_step_sampler(SamplingParams(min_tokens=9), eos_token_ids=ENDS, mask=mask)
    logits = mx.zeros((1, facts.vocab_size))
    logits[0, EOS] = 9
    tokens = []
    for step in range(3):
        tokens.append(sampler.sample(logits, step).item())
        mask.accept(tokens[-1])

    assert tokens == [ord("a"), ord("b"), EOS]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 7), (3, 32), (4, 1001)])
def test_masks_of_all_rows_in_one_operation(dtype, num_rows, vocab_size):
    """Both ways of spreading bits keep open logits bit for bit, close the others, and leave unmasked rows alone."""
    random = np.random.default_rng(vocab_size)
    logits = (mx.array(random.normal(size=(num_rows, vocab_size)).astype(np.float32)) * 1e3).astype(dtype)
    logits[0, 0] = mx.inf
    logits[0, 1] = -mx.inf
    num_words = [-(-vocab_size // 32) - (row % 2) for row in range(num_rows)]
    words = [random.integers(0, 2**32, size, dtype=np.uint32) for size in num_words]
    if num_rows > 1:
        words[1] = None
    for on_device in (False, True, None):
        masked = close_tokens(logits, words, on_device=on_device)
        assert masked.dtype == dtype
        for row in range(num_rows):
            if words[row] is None:
                is_open = np.ones(vocab_size, bool)
            else:
                bits = np.unpackbits(words[row].view(np.uint8), bitorder="little").astype(bool)
                is_open = np.pad(bits, (0, vocab_size))[:vocab_size]
            given = np.array(logits[row].astype(mx.float32))
            expected = np.where(is_open, given, -np.inf)
            assert np.array_equal(np.array(masked[row].astype(mx.float32)), expected)


def test_other_masks_still_fit(compiler, facts):
    """A mask of the protocol's one method works beside bitmasks in one batch."""

    class OnlyZ:
        def apply_mask(self, logits):
            return mx.where(mx.arange(logits.shape[-1]) == ord("z"), logits, -mx.inf)

    rows = [
        create_row_sampling(make_step_sampler(SamplingParams(), mask=mask))
        for mask in (OnlyZ(), compiler.compile(GrammarSpec.regex("q")), None)
    ]
    logits = mx.zeros((3, facts.vocab_size))

    assert BatchSampler().sample(logits, rows).tokens.tolist() == [ord("z"), ord("q"), 0]
    with pytest.raises(InvalidSamplingParams):
        make_step_sampler(SamplingParams(logit_bias={5000: 1.0}), vocab_size=320)
