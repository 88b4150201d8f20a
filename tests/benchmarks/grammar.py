"""Print what a grammar costs, in itself and in a step of the engine, and how many steps jump-forward saves (issue 8).

    python tests/benchmarks/grammar.py [--parts masks steps jumps] [--models smollm2-135m gemma-3-270m.gguf]
        [--rows 1 8 32] [--tokens 400]

Models are names or GGUF files; of these only the vocabulary is read. A row is led through replies by a random model.
"mask" is from an accepted token to the next mask, in one thread, "accept" goes on by a token, "one open" is the share
of masks with one open token. "all masks" is `start_masks` until the last row's mask is there, while nothing else runs,
and "apply" the operation on logits that closes the tokens of all rows, evaluated. "uncached" compiles a grammar that
the compiler has not seen, "cached" one that it has. Microseconds unless stated; medians, and the 99th percentile.

"steps" are whole steps of the engine with a model that computes nothing, all rows inside a JSON string, without and
with a grammar. "jumps" are replies of the first model to requests for tool calls, as the server asks for them.
"""

# ruff: noqa: E402 - a fast BLAS has to be there before mlx

import argparse
import itertools
import json
import statistics
import time
from functools import partial
from pathlib import Path

from headrace_models.device import enable_fast_blas

enable_fast_blas()

import mlx.core as mx
import numpy as np

from headrace_http_api.parsing.families import find_family
from headrace_models import load, read_config, resolve
from headrace_models.gguf_file import read_gguf
from headrace_models.tokenizer import build_tokenizer
from headrace_sampling import (
    GrammarCompiler,
    GrammarSpec,
    GrammarTag,
    SamplingParams,
    TokenizerFacts,
    check_grammar,
    start_masks,
)
from headrace_sampling.bitmask import close_tokens
from headrace_scheduling import Engine, EngineConfig, GenerateOptions, GenerationRequest, Stop, Submit
from headrace_scheduling.assembly import make_loop
from headrace_scheduling.inbox import Inbox
from headrace_scheduling.runner import make_mlx_runner
from headrace_scheduling.testing import ModelLoaderFake, NullModel
from headrace_scheduling.testing.loading import FakeFacts

SCHEMAS = Path(__file__).parent.parent / "sampling" / "grammar_schemas.json"
KINDS = ("flat object", "tool choice", "extraction", "tree", "unicode keys", "format date-time", "any value")


def micros(seconds):
    return f"{statistics.median(seconds) * 1e6:,.0f}"


def timed(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def specs():
    schemas = {one["name"]: one["schema"] for one in json.loads(SCHEMAS.read_text("utf-8"))["supported"]}
    named = {f"schema: {name}": GrammarSpec.json_schema(schemas[name]) for name in KINDS}
    return {
        **named,
        "json_object": GrammarSpec.json_object(),
        "regex of a url": GrammarSpec.regex(r"https?://[a-z0-9.-]{3,40}(/[a-zA-Z0-9_%-]{1,20}){0,4}"),
        "choice of 200": GrammarSpec.choice([f"option {number}" for number in range(200)]),
        "lark expression": GrammarSpec.lark('start: t ("+" t)*\nt: f ("*" f)*\nf: /[0-9]+/ | "(" start ")"'),
    }


class Walk:
    """Leads rows through replies: mostly any open token, sometimes one that closes."""

    def __init__(self, facts, seed):
        self._random = np.random.default_rng(seed)
        self._ends = set(facts.eos_token_ids)

    def next(self, words):
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        closing = [one for one in self._ends if one in ids[:200]]
        if closing and self._random.random() < 0.5:
            return closing[0]
        return int(ids[self._random.integers(len(ids))])


def walk(compiler, spec, num_tokens, walker):
    """Times of masks and of accepted tokens along replies, and the share of masks with one open token."""
    masks, accepts, lone = [], [], 0
    row = compiler.compile(spec)
    while len(masks) < num_tokens:
        seconds, words = timed(row.mask_words)
        masks.append(seconds)
        token_id = walker.next(words)
        lone += int(np.bitwise_count(words).sum()) == 1
        seconds, _ = timed(lambda row=row, token_id=token_id: row.accept(token_id))
        accepts.append(seconds)
        if row.is_terminated or row.num_accepted > 150:
            row = compiler.compile(spec)
    return masks, accepts, lone / len(masks)


def batch(compiler, spec, num_rows, num_steps, walker):
    rows = [compiler.compile(spec) for _ in range(num_rows)]
    logits = mx.random.normal((num_rows, compiler.facts.vocab_size))
    mx.eval(logits)
    starts, waits, applies = [], [], []
    for _ in range(num_steps):
        begun = time.perf_counter()
        start_masks(rows)
        starts.append(time.perf_counter() - begun)
        words = [row.mask_words() for row in rows]
        waits.append(time.perf_counter() - begun)
        seconds, _ = timed(lambda words=words: mx.eval(close_tokens(logits, words)))
        applies.append(seconds)
        for place, row in enumerate(rows):
            row.accept(walker.next(words[place]))
            if row.is_terminated:
                rows[place] = compiler.compile(spec)
    return starts, waits, applies


# ---- steps of the engine ---------------------------------------------------------------------------------------------


def step_ms(compiler, num_rows, num_steps, *, has_grammar):
    """The median time of a decode step with a model that computes nothing, in milliseconds."""
    facts = FakeFacts(vocab_size=compiler.facts.vocab_size, eos_token_ids=frozenset(), max_positions=10 * num_steps)
    config = EngineConfig(
        loader=ModelLoaderFake(partial(NullModel, facts)),
        max_rows=num_rows,
        prompt_cache_bytes=0,
        compile_grammar=lambda loaded, spec: compiler.compile(spec),
    )
    loaded, inbox, times = config.loader(), Inbox(), []

    def publish(events):
        if events.status.num_running == num_rows:
            times.append(time.perf_counter())
        if len(times) >= num_steps:
            inbox.put(Stop())

    spec = GrammarSpec.json_schema({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]})
    loop = make_loop(loaded, make_mlx_runner(loaded, config), config, inbox=inbox, publish=publish)
    for request_id in range(num_rows):
        request = GenerationRequest(
            prompt_ids=(1, 2, 3), options=GenerateOptions(), grammar=spec if has_grammar else None
        )
        submit = Submit(request_id=request_id, request=request, max_tokens=9 * num_steps)
        inbox.put(submit)
    loop.run()
    return 1000 * statistics.median(later - earlier for earlier, later in itertools.pairwise(times[20:]))


def measure_steps(compiler, args):
    print("\n| rows | step, ms | step with a grammar, ms | per row, µs | share |")
    print("|---|---|---|---|---|")
    for num_rows in args.rows:
        free = step_ms(compiler, num_rows, 300, has_grammar=False)
        bound = step_ms(compiler, num_rows, 300, has_grammar=True)
        per_row = 1000 * (bound - free) / num_rows
        print(f"| {num_rows} | {free:.2f} | {bound:.2f} | {per_row:,.0f} | {(bound - free) / bound:.0%} |")


# ---- jump-forward ----------------------------------------------------------------------------------------------------

TOOLS = {
    "get_weather": {"city": {"type": "string", "maxLength": 24}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "create_event": {
        "title": {"type": "string", "maxLength": 32},
        "day": {"type": "string", "format": "date"},
        "is_private": {"type": "boolean"},
    },
    "search_files": {
        "query": {"type": "string", "maxLength": 24},
        "max_results": {"type": "integer", "minimum": 1, "maximum": 50},
        "sort": {"enum": ["name", "size", "modified"]},
    },
}
ASKED = (
    "The user asks for the weather in Paris. The assistant calls a tool:\n",
    "Put the meeting with Anna into my calendar for Monday.\n",
    "Find the ten newest notes about gardening.\n",
    "What is the temperature in Oslo, in Fahrenheit?\n",
)


def schema_of(properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def asked_for():
    """What the server compiles for a required call of one tool, of any of three, and for a response format."""
    form = find_family("", "hermes").tool_format
    tags = {
        name: GrammarTag(begin=form.begin(name), content=GrammarSpec.json_schema(schema_of(fields)), end=form.end)
        for name, fields in TOOLS.items()
    }
    calls = {name: [tag] for name, tag in tags.items()} | {"one of the three": list(tags.values())}
    specs = {
        f"call of {name}" if name in tags else name: GrammarSpec.structural_tag(
            chosen, triggers=[form.trigger], allows_text=False
        )
        for name, chosen in calls.items()
    }
    event = schema_of(TOOLS["create_event"])
    specs["response format: create_event"] = GrammarSpec.json_schema(event)
    specs["the same, compact"] = GrammarSpec.json_schema(event, compact=True)
    return specs


def replies(name, compiler, prompts, *, jump_forward):
    """Steps, seconds and tokens of each kind of request: two prompts, each alone, then four at once."""
    config = EngineConfig(
        loader=partial(load, name),
        max_rows=8,
        prompt_cache_bytes=0,
        compile_grammar=lambda loaded, spec: compiler.compile(spec),
        jump_forward=jump_forward,
    )
    found = {}
    with Engine.open_config(config) as engine:
        for kind, spec in asked_for().items():
            options = GenerateOptions(max_tokens=150, sampling=SamplingParams())
            requests = [GenerationRequest(prompt_ids=one, options=options, grammar=spec) for one in prompts]
            engine.run(requests[:1])
            for batch in ([one] for one in requests[:2]), [requests]:
                before = engine.status.num_steps
                seconds, results = timed(lambda batch=batch: [r for one in batch for r in engine.run(one)])
                steps = engine.status.num_steps - before
                found[kind, len(found) % 2] = steps, seconds, [one.token_ids for (one,) in results]
    return found


def measure_jumps(name, compiler, tokenizer):
    prompts = [tuple(tokenizer.encode(text).ids) for text in ASKED]
    without, jumping = (replies(name, compiler, prompts, jump_forward=jumps) for jumps in (False, True))
    print("\n| reply | tokens | steps, alone | with jump-forward | saved | time saved | saved in a batch of 4 | time |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in asked_for():
        parts = []
        for place in (0, 1):
            steps, seconds, tokens = without[kind, place]
            fewer, less, same = jumping[kind, place]
            assert tokens == same, (kind, place)
            parts.append((steps, fewer, f"{1 - fewer / steps:.0%}", f"{1 - less / seconds:.0%}"))
        (steps, fewer, saved, faster), (_, _, *together) = parts
        num_tokens = sum(map(len, without[kind, 0][2]))
        print(f"| {kind} | {num_tokens} | {steps} | {fewer} | {saved} | {faster} | {together[0]} | {together[1]} |")


def measure(name, args, parts):
    source = resolve(name)
    tokenizer = build_tokenizer(read_gguf(source.path).metadata)
    config = read_config(source)
    facts = TokenizerFacts(
        vocab_size=config.vocab_size, eos_token_ids=tuple(config.eos_token_ids), tokenizer_json=tokenizer.to_str()
    )
    seconds, compiler = timed(lambda: GrammarCompiler(facts))
    print(f"\n{source.name}: V = {facts.vocab_size:,}; reading the vocabulary takes {seconds:.2f} s\n")
    if "masks" in parts:
        measure_masks(compiler, args)
    if "steps" in parts:
        measure_steps(compiler, args)
    if "jumps" in parts:
        measure_jumps(name, compiler, tokenizer)


def measure_masks(compiler, args):
    print("| grammar | check, ms | uncached, ms | cached | mask | mask p99 | accept | one open |")
    print("|---|---|---|---|---|---|---|---|")
    walker = Walk(compiler.facts, 0)
    for kind, spec in specs().items():
        checked = statistics.median(timed(lambda spec=spec: check_grammar(spec))[0] for _ in range(5)) * 1e3
        first = timed(lambda spec=spec: compiler.compile(spec))[0] * 1e3
        cached = [timed(lambda spec=spec: compiler.compile(spec))[0] for _ in range(20)]
        masks, accepts, lone = walk(compiler, spec, args.tokens, walker)
        tail = f"{np.percentile(masks, 99) * 1e6:,.0f}"
        print(
            f"| {kind} | {checked:.1f} | {first:.1f} | {micros(cached)} | {micros(masks)} | {tail} | {micros(accepts)} "
            f"| {lone:.0%} |"
        )
    print("\n| rows | start returns | all masks | apply | both, per row |")
    print("|---|---|---|---|---|")
    for num_rows in args.rows:
        starts, waits, applies = batch(compiler, specs()["schema: extraction"], num_rows, 60, walker)
        whole = [wait + apply for wait, apply in zip(waits, applies, strict=True)]
        per_row = [one / num_rows for one in whole]
        print(f"| {num_rows} | {micros(starts)} | {micros(waits)} | {micros(applies)} | {micros(per_row)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["masks", "steps", "jumps"], default=["masks", "steps", "jumps"])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    for place, name in enumerate(args.models):
        measure(name, args, [part for part in args.parts if not (place and part == "jumps")])


if __name__ == "__main__":
    main()
