"""Time the prefix cache against the prompt cache of mlx-lm's server.

    python tests/benchmarks/prefix_cache.py [--entries 20] [--tokens 8000] [--layers 30] [--repeats 50]

Entries share their first half. Their caches are small (one head of 8 elements), so that the times are those of looking
up and cloning; bytes that are copied later, by whoever writes first, are timed as "and append". Medians in
microseconds, the two sides in turn, because a machine's speed wanders.
"""

import argparse
import random
import statistics
import time
from functools import partial

import mlx.core as mx
from mlx_lm.models import cache as theirs

from headrace_kvcache import KVCache, PrefixCache, PrefixNamespace

NAMESPACE = PrefixNamespace("unquantized-float32")


def filled(make, num_tokens, num_layers, *, heads=1, size=8):
    caches = [make() for _ in range(num_layers)]
    for cache in caches:
        keys = mx.random.normal((1, heads, num_tokens, size))
        cache.update_and_fetch(keys, keys)
    mx.eval([cache.keys for cache in caches], [cache.values for cache in caches])
    return caches


def prompts(count, num_tokens):
    draw = random.Random(0)
    stem = [draw.randrange(150_000) for _ in range(num_tokens // 2)]
    return [stem + [draw.randrange(150_000) for _ in range(num_tokens - len(stem))] for _ in range(count)]


def timed(action):
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1e6


def append(caches):
    one = mx.ones((1, 1, 1, 8))
    for cache in caches:
        cache.update_and_fetch(one, one)
    mx.eval([cache.keys for cache in caches], [cache.values for cache in caches])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("entries", 20), ("tokens", 8000), ("layers", 30), ("repeats", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    ours, other = PrefixCache(1 << 40), theirs.LRUPromptCache(max_size=args.entries)
    keys = prompts(args.entries, args.tokens)
    own_caches = filled(KVCache, args.tokens, args.layers)
    their_caches = filled(theirs.KVCache, args.tokens, args.layers)
    puts = [
        (
            timed(lambda key=key: ours.put(key, own_caches, namespace=NAMESPACE)),
            timed(lambda key=key: other.insert_cache("model", key, their_caches)),
        )
        for key in keys
    ]
    asked = {
        "exact": [*keys[3], 7],
        "trimmed": [*keys[3][: args.tokens * 3 // 4], 7, 7],
        "shared half": [*keys[3][: args.tokens // 2], 7, 7],
        "miss": [7, *keys[3]],
    }
    rows = [("put", puts)]
    for name, prompt in asked.items():
        assert (name == "miss") == (ours.take(prompt, namespace=NAMESPACE) is None)
        pairs = [
            (
                timed(partial(ours.take, prompt, namespace=NAMESPACE)),
                timed(partial(other.fetch_nearest_cache, "model", prompt)),
            )
            for _ in range(args.repeats)
        ]
        rows.append((f"take, {name}", pairs))
    pairs = [
        (
            timed(lambda: append(ours.take(asked["exact"], namespace=NAMESPACE).caches)),
            timed(lambda: append(other.fetch_nearest_cache("model", asked["exact"])[0])),
        )
        for _ in range(args.repeats)
    ]
    rows.append(("take, exact, and append", pairs))
    for name, pairs in rows:
        own, their = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(their / own for own, their in pairs)
        print(f"{name:24} headrace {own:9.0f}  mlx-lm {their:9.0f}  mlx-lm / headrace {ratio:6.2f}")


if __name__ == "__main__":
    main()
