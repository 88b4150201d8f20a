"""Time batches of KV caches against mlx-lm's batch cache classes.

    python tests/benchmarks/kvcache.py [--rows 1 8 32] [--tokens 512 4096 8192] [--repeats 7] [--kinds plain ring]

Per number of rows and tokens, the median time of one layer's operation and the ratio mlx-lm / Headrace, the median over
interleaved pairs, because a machine's speed wanders:

update   append one position per row and attend over everything
join     merge one more row of the same length, the last of the rows
leave    drop the last row
extract  copy one row out as a single cache

"rows" is the same through `RowBatch`, as Headrace's own models take it; the others go through mlx-lm's protocol.

With --parts, what the operations consist of, each evaluated apart:

mask, write, attend   the three parts of an update, after a row has joined, so that ends differ
write rows, see rows  the two parts of an update of `RowBatch`; mlx-lm's mask and attention are one there
merge, first update   the two parts of a join of the only row
extract, then append  a copy of one row, and the first position appended to it; also of a row of `RowBatch`
"""

import argparse
import statistics
import time

import mlx.core as mx
from mlx_lm.models import cache as theirs

from headrace_kvcache import KVCache, RotatingKVCache, RotatingRowBatch, RowBatch, attend, merge_caches

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64


def single(kind, source, num_tokens):
    """Return a filled single cache: `source` is "headrace" or "mlx-lm"."""
    window = max(256, num_tokens // 2)
    makers = {
        ("plain", "headrace"): KVCache,
        ("plain", "mlx-lm"): theirs.KVCache,
        ("ring", "headrace"): lambda: RotatingKVCache(window),
        ("ring", "mlx-lm"): lambda: theirs.RotatingKVCache(window),
    }
    cache = makers[kind, source]()
    for start in range(0, num_tokens, 256):
        added = mx.random.normal((1, KV_HEADS, min(256, num_tokens - start), HEAD_DIM))
        cache.update_and_fetch(added, added)
        mx.eval(cache.keys, cache.values)
    return cache


def batch(kind, source, caches):
    merged = merge_caches(caches) if source == "headrace" else type(caches[0]).merge(caches)
    append(merged, len(caches))
    return merged


def append(merged, num_rows):
    one = mx.ones((num_rows, KV_HEADS, 1, HEAD_DIM))
    mask = merged.make_mask(1)
    keys, values = merged.update_and_fetch(one, one)
    queries = mx.ones((num_rows, HEADS, 1, HEAD_DIM))
    mx.eval(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1, mask=mask))


def append_rows(rows):
    slots = rows.joined
    one = mx.ones((len(slots), KV_HEADS, 1, HEAD_DIM))
    [view] = rows.view(slots, 1)
    mx.eval(attend(view, mx.ones((len(slots), HEADS, 1, HEAD_DIM)), one, one, scale=0.1))
    del view
    rows.advance(slots, 1)


def timed(action):
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1e3


class Case:
    """The operations of one source on rows of one length."""

    def __init__(self, kind, source, num_rows, num_tokens):
        self.source, self.num_rows = source, num_rows
        self.joiner = single(kind, source, num_tokens)
        self.merged = batch(kind, source, [self.joiner] * num_rows)
        self.kind = kind

    def update(self):
        return timed(lambda: append(self.merged, self.num_rows))

    def join(self):
        def act():
            other = merge_caches([self.joiner]) if self.source == "headrace" else type(self.joiner).merge([self.joiner])
            self.merged.extend(other)
            mx.eval(self.merged.state)

        if self.num_rows == 1:
            return timed(self.restart)
        return timed(act)

    def restart(self):
        self.merged = batch(self.kind, self.source, [self.joiner])

    def leave(self):
        """The row comes back with the next `join`."""

        def act():
            self.merged.filter(list(range(self.num_rows - 1)))
            mx.eval(self.merged.state)

        return 0.0 if self.num_rows == 1 else timed(act)

    def extract(self):
        def act():
            cache = self.merged.extract(self.num_rows // 2)
            mx.eval(cache.keys, cache.values)

        return timed(act)


def update_parts(case):
    """Time mask, write and attention of one update, each evaluated before the next."""
    merged, num_rows = case.merged, case.num_rows
    one, queries = (mx.ones((num_rows, heads, 1, HEAD_DIM)) for heads in (KV_HEADS, HEADS))
    mx.eval(one, queries)
    found = {}

    def make_mask():
        found["mask"] = merged.make_mask(1)
        if isinstance(found["mask"], mx.array):
            mx.eval(found["mask"])

    def write():
        found["pair"] = merged.update_and_fetch(one, one)
        mx.eval(found["pair"])

    def attend_to():
        mx.eval(mx.fast.scaled_dot_product_attention(queries, *found["pair"], scale=0.1, mask=found["mask"]))

    # What was fetched is dropped with `found`: a live view would turn the next write into a copy.
    return {"mask": timed(make_mask), "write": timed(write), "attend": timed(attend_to)}


def update_row_parts(rows, parts):
    """Time an update of `RowBatch` beside the parts of mlx-lm's: its writes, then its mask and attention."""
    slots = rows.joined
    one, queries = (mx.ones((len(slots), heads, 1, HEAD_DIM)) for heads in (KV_HEADS, HEADS))
    mx.eval(one, queries)
    found = {}

    def write():
        [view] = rows.view(slots, 1)
        found["seen"] = attend(view, queries, one, one, scale=0.1)
        mx.eval(rows.arrays)

    times = {
        "write rows": [timed(write), parts["write"]],
        "see rows": [timed(lambda: mx.eval(found["seen"])), parts["mask"] + parts["attend"]],
    }
    rows.advance(slots, 1)
    return times


def extract_row_parts(rows, parts):
    """As `extract_parts`, of a row of `RowBatch`."""
    found = {}
    one = mx.ones((1, KV_HEADS, 1, HEAD_DIM))

    def extract():
        [found["cache"]] = rows.extract(0)
        mx.eval(found["cache"].keys, found["cache"].values)

    times = {"extract rows": [timed(extract), parts["extract"]]}
    append_one = timed(lambda: mx.eval(found["cache"].update_and_fetch(one, one)))
    return times | {"then append rows": [append_one, parts["then append"]]}


def join_parts(case):
    """Time merging one cache into a batch, and the batch's first update."""
    found = {}

    def merge():
        caches = [case.joiner]
        found["batch"] = merge_caches(caches) if case.source == "headrace" else type(case.joiner).merge(caches)
        mx.eval(found["batch"].state)

    return {"merge": timed(merge), "first update": timed(lambda: append(found["batch"], 1))}


def extract_parts(case):
    """Time copying a row out, and the first position appended to the copy."""
    found = {}
    one = mx.ones((1, KV_HEADS, 1, HEAD_DIM))

    def extract():
        found["cache"] = case.merged.extract(case.num_rows // 2)
        mx.eval(found["cache"].keys, found["cache"].values)

    def append_one():
        mx.eval(found["cache"].update_and_fetch(one, one))

    return {"extract": timed(extract), "then append": timed(append_one)}


def measure_parts(kind, num_rows, num_tokens, repeats):
    """As `measure`, of the parts of operations."""
    cases = [Case(kind, source, num_rows, num_tokens) for source in ("headrace", "mlx-lm")]
    rows = row_batch(kind, num_rows, num_tokens, cases[0].joiner)
    times = {}
    for _ in range(repeats + 1):
        for case in cases:
            case.leave()
            case.join()
        rows.leave(num_rows - 1)
        join_rows(rows, cases[0].joiner)
        append_rows(rows)
        pairs, others = {}, {}
        for parts in (update_parts, extract_parts, *([join_parts] if num_rows == 1 else [])):
            ours, other = (parts(case) for case in cases)
            pairs |= {name: [time_ms, other[name]] for name, time_ms in ours.items()}
            others |= other
        for name, pair in (pairs | update_row_parts(rows, others) | extract_row_parts(rows, others)).items():
            times.setdefault(name, []).append(pair)
    return {name: summary(pairs[1:]) for name, pairs in times.items()}


def row_batch(kind, num_rows, num_tokens, joiner):
    window = max(256, num_tokens // 2)
    rows = RowBatch(1, max_rows=num_rows) if kind == "plain" else RotatingRowBatch(1, max_rows=num_rows, window=window)
    for _ in range(num_rows):
        rows.join_caches([joiner], num_tokens=num_tokens + 1024)
    append_rows(rows)
    return rows


def join_rows(rows, joiner):
    rows.join_caches([joiner], num_tokens=joiner.offset + 1024)
    mx.eval(rows.arrays)


def extract_rows(rows):
    [cache] = rows.extract(0)
    mx.eval(cache.keys, cache.values)


def measure(kind, num_rows, num_tokens, repeats):
    """Return per operation the two medians in ms and the median ratio of interleaved pairs."""
    cases = [Case(kind, source, num_rows, num_tokens) for source in ("headrace", "mlx-lm")]
    joiner = cases[0].joiner
    rows = row_batch(kind, num_rows, num_tokens, joiner)
    by_rows = {
        "update": lambda: append_rows(rows),
        "leave": lambda: rows.leave(num_rows - 1),
        "join": lambda: join_rows(rows, joiner),
        "extract": lambda: extract_rows(rows),
    }
    times = {}
    for _ in range(repeats):
        for name, action in by_rows.items():
            pair = [getattr(case, name)() for case in cases]
            times.setdefault(name, []).append(pair)
            times.setdefault(f"{name} rows", []).append([timed(action), pair[1]])
        # Untimed: a row that fills its buffers alone shares the joiner's bytes until the first write.
        append_rows(rows)
    if num_rows == 1:
        del times["leave"], times["leave rows"]
    return {name: summary(pairs[1:] or pairs) for name, pairs in times.items()}


def summary(pairs):
    ours, other = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    return ours, other, statistics.median(pair[1] / pair[0] for pair in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 8192])
    parser.add_argument("--kinds", nargs="+", default=["plain", "ring"], choices=["plain", "ring"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parts", action="store_true", help="what the operations consist of")
    options = parser.parse_args()
    print("| kind | rows | tokens | operation | Headrace, ms | mlx-lm, ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        for num_rows in options.rows:
            for num_tokens in options.tokens:
                run = measure_parts if options.parts else measure
                measured = run(kind, num_rows, num_tokens, options.repeats)
                for name, (ours, other, ratio) in measured.items():
                    print(
                        f"| {kind} | {num_rows} | {num_tokens} | {name} | {ours:.3f} | {other:.3f} | {ratio:.2f} |",
                        flush=True,
                    )
                mx.clear_cache()


if __name__ == "__main__":
    main()
