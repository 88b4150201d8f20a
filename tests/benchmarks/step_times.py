"""Time of a decode step against the number of rows and the tokens that each row holds, as a table and a plot.

    uv run --with matplotlib python tests/benchmarks/step_times.py [--rows 1 2 4] [--context 128 512] [--plot FILE.svg]

Every row is a copy of one prefilled cache, so that all rows of a step are equally long. A step is what the engine
does: one view of the slots, one forward, argmax, one read. The figure is the median of the steps after the first two.
"""

import argparse
import statistics
import time

from headrace_models.device import enable_fast_blas

BLAS = enable_fast_blas()

import mlx.core as mx  # noqa: E402

from headrace_kvcache import make_row_batch  # noqa: E402
from headrace_models import load  # noqa: E402

_SLICE = 512
_SPARE_TOKENS = 64


def prefill(model, num_tokens):
    """Put so many random tokens into the only row of new slots, and return its caches."""
    batch = make_row_batch(model.make_cache(), max_rows=1)
    slot = batch.join(num_tokens=num_tokens)
    ids = mx.random.randint(300, 30_000, (1, num_tokens), key=mx.random.key(7)).astype(mx.int32)
    for begin in range(0, num_tokens, _SLICE):
        part = ids[:, begin : begin + _SLICE]
        mx.eval(model.forward_hidden(part, batch.view([slot], part.shape[1])))
        batch.advance([slot], part.shape[1])
    return batch.extract(slot)


def measure(model, caches, num_tokens, num_rows, num_steps):
    """Return the median of a step in milliseconds."""
    batch = make_row_batch(model.make_cache(), max_rows=num_rows)
    slots = []
    for _ in range(num_rows):
        slots.append(batch.join_caches(caches, num_tokens=num_tokens + _SPARE_TOKENS))
        mx.eval(batch.arrays)
    tokens = mx.full((num_rows,), 300, dtype=mx.int32)
    times = []
    for _ in range(num_steps + 2):
        begin = time.perf_counter()
        hidden = model.forward_hidden(tokens[:, None], batch.view(slots, 1))
        batch.advance(slots, 1)
        tokens = mx.argmax(model.logits_from_hidden(hidden)[:, 0], axis=-1).astype(mx.int32)
        tokens.tolist()
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times[2:])


def plot(found, path):
    """Draw step time against rows, one line per context, both axes logarithmic."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for context, times in found.items():
        axes.plot(list(times), list(times.values()), marker="o", label=f"{context:,} tokens per row")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(rows := list(next(iter(found.values()))), [str(row) for row in rows])
    axes.set_xlabel("rows in the step")
    axes.set_ylabel("step, ms")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512, 2048, 8100])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plot", help="file for the plot; its ending names the format")
    args = parser.parse_args()
    model = load(args.model, dtype="float32").model
    print(f"BLAS: {BLAS.name}; ms per step\ncontext  " + "  ".join(f"{rows:7d}" for rows in args.rows), flush=True)
    found = {}
    for context in args.context:
        caches = prefill(model, context)
        found[context] = {rows: measure(model, caches, context, rows, args.steps) for rows in args.rows}
        print(f"{context:7d}  " + "  ".join(f"{ms:7.1f}" for ms in found[context].values()), flush=True)
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
