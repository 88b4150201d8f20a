"""Decode steps of Headrace's model and slots against mlx-lm's own loop: same process, weights, dtype and BLAS.

    uv run python tests/benchmarks/decode.py [--rows 1 8] [--rounds 8] [--tokens 48] [--prompt 192]

One row runs mlx-lm's `generate_step`, several its `BatchGenerator`, both greedy. Headrace runs steps as its engine
does: one view of the slots, one forward, argmax, one read. Prefill is not timed. A round times both sides, in turns
first; a ratio is mlx-lm's time divided by Headrace's in the same round, and the table has the median. Both sides must
give the same tokens. On a busy machine take `--clock cpu`, CPU time, with MKL_NUM_THREADS=1.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from headrace_models.device import enable_fast_blas

BLAS = enable_fast_blas()

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import BatchGenerator, generate_step  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

from headrace_kvcache import make_row_batch  # noqa: E402
from headrace_models import export, load  # noqa: E402

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def make_prompts(num_rows: int, num_tokens: int) -> list[list[int]]:
    """Rows of different tokens and lengths."""
    ids = mx.random.randint(300, 30_000, (num_rows, num_tokens), key=mx.random.key(7)).tolist()
    return [row[: num_tokens - index] for index, row in enumerate(ids)]


def decode_mlx_lm(model, prompts, num_tokens, clock):
    """Return seconds per step and each row's tokens."""
    if len(prompts) == 1:
        steps = generate_step(mx.array(prompts[0]), model, max_tokens=num_tokens + 1)
        tokens = [next(steps)[0]]
        start = clock()
        tokens += [token for token, _ in steps]
        return (clock() - start) / num_tokens, [[int(token) for token in tokens]]
    generator = BatchGenerator(model, max_tokens=num_tokens + 1)
    uids = generator.insert(prompts)
    found = {uid: [] for uid in uids}
    start = None
    while min(map(len, found.values())) < num_tokens + 1:
        for response in generator.next_generated():
            found[response.uid].append(response.token)
        if start is None and min(map(len, found.values())):
            start, num_before = clock(), len(found[uids[0]])
    seconds = (clock() - start) / (num_tokens + 1 - num_before)
    generator.close()
    return seconds, list(found.values())


def decode_headrace(model, prompts, num_tokens, clock):
    """Return seconds per step and each row's tokens."""
    batch = make_row_batch(model.make_cache(), max_rows=len(prompts))
    slots = [batch.join() for _ in prompts]
    firsts = []
    for slot, prompt in zip(slots, prompts, strict=True):
        hidden = model.forward_hidden(mx.array([prompt], dtype=mx.int32), batch.view([slot], len(prompt)))
        batch.advance([slot], len(prompt))
        firsts.append(mx.argmax(model.logits_from_hidden(hidden[:, -1:])[:, 0], axis=-1))
        mx.eval(firsts)
    tokens = mx.concatenate(firsts).astype(mx.int32)
    found = [tokens.tolist()]

    def step(tokens):
        hidden = model.forward_hidden(tokens[:, None], batch.view(slots, 1))
        batch.advance(slots, 1)
        return mx.argmax(model.logits_from_hidden(hidden)[:, 0], axis=-1)

    start = clock()
    tokens = step(tokens)
    for index in range(num_tokens):
        mx.async_eval(tokens)
        following = step(tokens) if index + 1 < num_tokens else None
        found.append(tokens.tolist())
        tokens = following
    return (clock() - start) / num_tokens, [list(row) for row in zip(*found, strict=True)]


def compare(ours, theirs, num_rows, args):
    prompts = make_prompts(num_rows, args.prompt)
    sides = {"headrace": (decode_headrace, ours), "mlx-lm": (decode_mlx_lm, theirs)}
    times = {name: [] for name in sides}
    for index in range(args.rounds + 1):
        tokens = {}
        for name in sides if index % 2 else reversed(sides):
            decode, model = sides[name]
            seconds, tokens[name] = decode(model, prompts, args.tokens, CLOCKS[args.clock])
            if index:
                times[name].append(1000 * seconds)
        if tokens["headrace"] != tokens["mlx-lm"]:
            raise SystemExit(f"tokens differ in round {index}: {tokens}")
    ratios = [theirs / ours for ours, theirs in zip(times["headrace"], times["mlx-lm"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"{num_rows:4d}  {medians['headrace']:11.1f}  {medians['mlx-lm']:9.1f}  {statistics.median(ratios):6.2f}"
        f"  ({min(ratios):.2f}, {max(ratios):.2f})",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        exported = export(args.model, Path(folder) / "model")
        theirs, _ = load_model(exported)
        ours = load(exported, dtype="float32").model
        mx.eval(theirs.parameters())
    print(f"BLAS: {BLAS.name}; {args.prompt} prompt and {args.tokens} decoded tokens")
    print(f"medians of {args.rounds} pairs, {args.clock} time")
    print("rows  Headrace ms  mlx-lm ms   ratio  (min, max)")
    for num_rows in args.rows:
        compare(ours, theirs, num_rows, args)


if __name__ == "__main__":
    main()
