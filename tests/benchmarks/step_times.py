"""Time of a decode step against the number of rows and the tokens that each row holds, as a table and a plot.

    uv run --with matplotlib python tests/benchmarks/step_times.py [--rows 1 2 4] [--context 128 512] [--plot FILE.svg]

All rows of a step are equally long, copies of one cache of random keys and values, which take as long as computed
ones. A step is what the engine does: one view of the slots, one forward, argmax, one read. The figure is the median of
the steps after the first two.
"""

import argparse
import statistics
import time

from headrace_models.device import enable_fast_blas

BLAS = enable_fast_blas()

import mlx.core as mx  # noqa: E402

from headrace_kvcache import make_row_batch  # noqa: E402
from headrace_models import load  # noqa: E402

_FEW_TOKENS = 16
_SPARE_TOKENS = 64


def filled(model, num_tokens):
    """Return caches of so many tokens, random beyond the first few."""
    batch = make_row_batch(model.make_cache(), max_rows=1)
    slot = batch.join(num_tokens=_FEW_TOKENS)
    mx.eval(model.forward_hidden(mx.full((1, _FEW_TOKENS), 300, dtype=mx.int32), batch.view([slot], _FEW_TOKENS)))
    batch.advance([slot], _FEW_TOKENS)
    return [_grown(cache, num_tokens) for cache in batch.extract(slot)]


def _grown(cache, num_tokens):
    keys, values, _ = cache.state
    shapes = [(*side.shape[:2], num_tokens, side.shape[3]) for side in (keys, values)]
    return type(cache).from_state((*(mx.random.normal(shape) for shape in shapes), num_tokens))


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
        caches = filled(model, context)
        found[context] = {rows: measure(model, caches, context, rows, args.steps) for rows in args.rows}
        print(f"{context:7d}  " + "  ".join(f"{ms:7.1f}" for ms in found[context].values()), flush=True)
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
