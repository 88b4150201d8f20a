"""Print what a grammar costs: compiling it, its masks, and masking a batch (issue 14).

    python tests/benchmarks/grammar.py [--models smollm2-135m gemma-3-270m.gguf] [--rows 1 8 32] [--tokens 400]

Models are names or GGUF files; of these only the vocabulary is read. A row is led through replies by a random model.
"mask" is from an accepted token to the next mask, in one thread, "accept" goes on by a token, "one open" is the share
of masks with one open token. "all masks" is `start_masks` until the last row's mask is there, while nothing else runs,
and "apply" the operation on logits that closes the tokens of all rows, evaluated. "uncached" compiles a grammar that
the compiler has not seen, "cached" one that it has. Microseconds unless stated; medians, and the 99th percentile.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from headrace_models import read_config, resolve
from headrace_models.gguf_file import read_gguf
from headrace_models.tokenizer import build_tokenizer
from headrace_sampling import GrammarCompiler, GrammarSpec, TokenizerFacts, check_grammar, start_masks
from headrace_sampling.bitmask import close_tokens

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


def measure(name, args):
    source = resolve(name)
    tokenizer = build_tokenizer(read_gguf(source.path).metadata)
    config = read_config(source)
    facts = TokenizerFacts(
        vocab_size=config.vocab_size, eos_token_ids=tuple(config.eos_token_ids), tokenizer_json=tokenizer.to_str()
    )
    seconds, compiler = timed(lambda: GrammarCompiler(facts))
    print(f"\n{source.name}: V = {facts.vocab_size:,}; reading the vocabulary takes {seconds:.2f} s\n")
    print("| grammar | check, ms | uncached, ms | cached | mask | mask p99 | accept | one open |")
    print("|---|---|---|---|---|---|---|---|")
    walker = Walk(facts, 0)
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
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    for name in args.models:
        measure(name, args)


if __name__ == "__main__":
    main()
