"""Time the books of a round of speculation: begin and resolve, without the forward between them.

    python tests/benchmarks/rollback.py [--kinds plain hybrid] [--rows 8] [--layers 30] [--contexts 512 4096 16384]

Per kind of caches and context the median time of begin + resolve in milliseconds for a round of four drafts of which
the rows accept different numbers, drawn anew for each, and how much active memory beginning adds. Between the two, not
timed, come what a round does there: a forward, here one small append to every layer, and the acceptance, which reads
the tokens and compares them with the drafts. Without that, `--cold`, resolve is the first Python after the wait for the
forward, and what it touches has left the processor's caches. "slots" are `make_row_batch`'s, as the scheduler holds
them; "batch" is one object per layer, as mlx-lm's `BatchGenerator` holds them; "alone" is one row. A recurrent layer's
resolve replays, so its time includes that of building the layers' own graphs, a toy of three operations here, which is
also given apart. The layers of "hybrid" tell one replay, which slots call once for all of them; those of "hybrid, own"
tell one each. Slots join what the layers tell in the `advance` of the round's step; that is timed beside the rest.
"""

import argparse
import statistics
import time
from random import Random

import mlx.core as mx

from headrace_kvcache import (
    KVCache,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    attend,
    bind_cache_rollback,
    bind_row_cache_rollback,
    make_row_batch,
    merge_caches,
)

HEADS, KV_HEADS, HEAD_DIM, DRAFTS = 2, 1, 32, 4
WINDOW = 512

KINDS = {
    "plain": lambda _: KVCache(),
    "quantized": lambda _: QuantizedKVCache(bits=8, group_size=32),
    "sliding": lambda layer: KVCache() if layer % 6 == 5 else RotatingKVCache(WINDOW),
    "hybrid": lambda layer: KVCache() if layer % 4 == 3 else RecurrentCache(1),
    "hybrid, own": lambda layer: KVCache() if layer % 4 == 3 else RecurrentCache(1),
}


REPLAYS = []


def run_layer(cache, num_rows, num_tokens, *, tells_own=False):
    if hasattr(cache, "record"):
        inputs = mx.ones((num_rows, num_tokens, HEAD_DIM))
        if tells_own:
            cache.record(lambda arrays, kept: replay(arrays, kept, inputs))
        else:
            cache.record(replay, inputs)
        cache[0] = summed(cache[0], inputs, None)
        cache.advance(num_tokens)
        return cache[0]
    queries, keys = (
        mx.ones((num_rows, HEADS, num_tokens, HEAD_DIM)),
        mx.ones((num_rows, KV_HEADS, num_tokens, HEAD_DIM)),
    )
    if hasattr(cache, "attend"):
        return attend(cache, queries, keys, keys, scale=0.1)
    mask = cache.make_mask(num_tokens)
    held = cache.update_and_fetch(keys, keys)
    return mx.fast.scaled_dot_product_attention(queries, *held, scale=0.1, mask=mask)


def replay(arrays, kept, inputs):
    begun = time.perf_counter()
    replayed = [summed(arrays[0], inputs, kept.mask(inputs.shape[1], ndim=3))]
    REPLAYS.append(time.perf_counter() - begun)
    return replayed


def summed(state, inputs, mask):
    added = inputs if mask is None else mx.where(mask, inputs, 0)
    return added.sum(axis=1) if state is None else state + added.sum(axis=1)


def filled(cache, num_tokens):
    """Return the cache with `num_tokens` positions, without the attention that they would cost."""
    for start in range(0, num_tokens, 256):
        added = mx.ones((1, KV_HEADS, min(256, num_tokens - start), HEAD_DIM))
        if hasattr(cache, "record"):
            run_layer(cache, 1, added.shape[2])
        else:
            cache.update_and_fetch(added, added)
        mx.eval(cache.state)
    return cache


class Case:
    """Caches of one holder, filled to a context."""

    def __init__(self, holder, make, num_rows, num_layers, context, *, tells_own=False):
        self.tells_own = tells_own
        self.is_alone = holder == "alone"
        self.num_rows = num_rows = 1 if holder == "alone" else num_rows
        singles = [filled(make(layer), context) for layer in range(num_layers)]
        self.batch = self.slots = None
        if holder == "slots":
            self.batch = make_row_batch([make(layer) for layer in range(num_layers)], max_rows=num_rows)
            self.slots = [self.batch.join_caches(singles, num_tokens=context + 1024) for _ in range(num_rows)]
            self.transaction = bind_row_cache_rollback([self.batch], num_rows, slots=self.slots)
        elif holder == "batch":
            self.caches = [merge_caches([single] * num_rows) for single in singles]
            self.transaction = bind_row_cache_rollback(self.caches, num_rows)
        else:
            self.caches = singles
            self.transaction = bind_cache_rollback(singles)
        # Once outside of a round: a recurrent layer has told then how it replays.
        self.forward(1)

    def forward(self, num_tokens):
        caches = self.caches if self.batch is None else self.batch.view(self.slots, num_tokens)
        outputs = [run_layer(cache, self.num_rows, num_tokens, tells_own=self.tells_own) for cache in caches]
        begun = time.perf_counter()
        if self.batch is not None:
            self.batch.advance(self.slots, num_tokens)
        spent = time.perf_counter() - begun
        mx.eval(outputs)
        return spent * 1e3

    def accept(self, wanted):
        """Return how many drafts the rows accept: the numbers wanted, by way of tokens that are read and compared."""
        drafts = [[row * DRAFTS + place for place in range(DRAFTS)] for row in range(self.num_rows)]
        places = mx.arange(DRAFTS)
        tokens = mx.where(places < mx.array(wanted)[:, None], mx.array(drafts), -1).tolist()
        return [
            next((place for place in range(DRAFTS) if own[place] != draft[place]), DRAFTS)
            for own, draft in zip(tokens, drafts, strict=True)
        ]

    def settle(self):
        mx.eval(self.batch.arrays if self.batch is not None else [cache.state for cache in self.caches])

    def round(self, wanted, *, is_cold):
        """Return milliseconds (begin and resolve, the replays in it, `advance`) and the bytes that beginning adds."""
        REPLAYS.clear()
        held = mx.get_active_memory()
        begun = time.perf_counter()
        self.transaction.begin(DRAFTS)
        spent = time.perf_counter() - begun
        added = mx.get_active_memory() - held
        advance_ms = self.forward(DRAFTS + 1)
        accepted = wanted if is_cold else self.accept(wanted)
        if self.is_alone:
            [accepted] = accepted
        begun = time.perf_counter()
        self.transaction.resolve(accepted)
        spent += time.perf_counter() - begun
        self.settle()
        return spent * 1e3, sum(REPLAYS) * 1e3, advance_ms, added


def measure(case, repeats, *, is_cold):
    random = Random(1)
    choices = [[random.randint(0, DRAFTS) for _ in range(case.num_rows)] for _ in range(repeats)]
    rounds = [case.round(numbers, is_cold=is_cold) for numbers in choices]
    times, replays, advances, added = zip(*rounds, strict=True)
    slowest = sorted(times)[int(0.95 * repeats)]
    return *map(statistics.median, (times, replays, advances)), slowest, max(added)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--cold", action="store_true", help="resolve at once, with an acceptance made before")
    options = parser.parse_args()
    print("| kind | holder | context | median ms | of it replays, ms | advance, ms | 95 % ms | bytes that begin adds |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        for holder in ("slots", "batch", "alone"):
            if kind == "quantized" and holder == "alone":
                continue
            for context in options.contexts:
                tells_own = kind == "hybrid, own"
                case = Case(holder, KINDS[kind], options.rows, options.layers, context, tells_own=tells_own)
                *times, added = measure(case, options.repeats, is_cold=options.cold)
                numbers = " | ".join(f"{time_ms:.3f}" for time_ms in times)
                print(f"| {kind} | {holder} | {context} | {numbers} | {added} |", flush=True)


if __name__ == "__main__":
    main()
