"""Print what a sampling step costs beside mlx-lm's own, row by row (issue 4).

    python tests/benchmarks/sampling.py [--rows 1 32] [--vocab 49152 262144] [--rounds 15]

From logits to tokens on the device, `mx.eval` included. mlx-lm's side is what its `GenerationBatch` does: processors
row by row, one log-softmax over the batch, one sampler call per row. Both see the same logits, of which the best hold
most of the mass as a language model's do. A batch holds one kind of row; "mixed" cycles through all of them. Ratios
are medians of interleaved pairs.
"""

import argparse
import statistics
import time

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from headrace_sampling import BatchSampler, SamplingParams, create_row_sampling, make_step_sampler

PROMPT = list(range(100, 164))
KINDS = {
    "greedy": {},
    "temperature": {"temp": 0.7},
    "top_p": {"temp": 0.8, "top_p": 0.95},
    "min_p": {"temp": 1.0, "min_p": 0.05},
    "top_k": {"temp": 0.7, "top_k": 40},
    "all three": {"temp": 0.7, "top_p": 0.9, "min_p": 0.02, "top_k": 64},
    "xtc": {"temp": 1.0, "min_p": 0.02, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "penalties": {
        "temp": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
}
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def logits_of(num_rows, vocab_size, seed):
    """Logits whose best token holds a quarter of the mass, and the best thousand nearly all."""
    random = np.random.default_rng(seed)
    ranks = np.argsort(random.random((num_rows, vocab_size)), axis=1) + 1
    scores = -1.6 * np.log(ranks) + random.normal(size=ranks.shape) * 0.5
    return mx.array(scores.astype(np.float32))


class Ours:
    def __init__(self, kinds):
        self._sampler = BatchSampler()
        self._rows = [create_row_sampling(self._make(kind, seed)) for seed, kind in enumerate(kinds)]

    @staticmethod
    def _make(kind, seed):
        keywords = dict(KINDS[kind])
        temperature = keywords.pop("temp", 0.0)
        windows = {"presence_window": 20, "frequency_window": 20} if kind == "penalties" else {}
        params = SamplingParams(temperature=temperature, seed=seed, **keywords, **windows)
        return make_step_sampler(params, initial_history=PROMPT)

    def step(self, logits):
        mx.eval(self._sampler.sample(logits, self._rows).tokens)


class MlxLm:
    """What mlx-lm's `GenerationBatch._step` does between logits and tokens."""

    def __init__(self, kinds):
        self._samplers, self._processors = [], []
        for kind in kinds:
            keywords = dict(KINDS[kind])
            penalties = {name: keywords.pop(name) for name in PENALTIES if name in keywords}
            self._samplers.append(make_sampler(**keywords))
            self._processors.append(make_logits_processors(**penalties))
        self._tokens = mx.array(PROMPT)

    def step(self, logits):
        if any(self._processors):
            rows = []
            for row, processors in enumerate(self._processors):
                one = logits[row : row + 1]
                for processor in processors:
                    one = processor(self._tokens, one)
                rows.append(one)
            logits = mx.concatenate(rows)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if all(sampler is self._samplers[0] for sampler in self._samplers):
            mx.eval(self._samplers[0](logprobs))
        else:
            mx.eval(mx.concatenate([s(logprobs[row : row + 1]) for row, s in enumerate(self._samplers)]))


def measure(kinds, vocab_size, num_rounds):
    """Return both medians in ms and the median ratio of interleaved pairs."""
    systems = (Ours(kinds), MlxLm(kinds))
    logits = [logits_of(len(kinds), vocab_size, seed) for seed in range(4)]
    mx.eval(logits)
    times = ([], [])
    for round_ in range(num_rounds + 2):
        order = (0, 1) if round_ % 2 else (1, 0)
        for index in order:
            begin = time.perf_counter()
            systems[index].step(logits[round_ % len(logits)])
            times[index].append(1000 * (time.perf_counter() - begin))
    ours, theirs = (column[2:] for column in times)
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours), statistics.median(theirs), ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 262144])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print("  vocab  rows  kind          headrace ms  mlx-lm ms  mlx-lm / headrace")
    names = list(KINDS)
    for vocab_size in args.vocab:
        for num_rows in args.rows:
            batches = {name: [name] * num_rows for name in names}
            if num_rows > 1:
                batches["mixed"] = [names[row % len(names)] for row in range(num_rows)]
            for name, kinds in batches.items():
                if num_rows > 1 and name != "mixed" and vocab_size > 100_000:
                    continue
                ours, theirs, ratio = measure(kinds, vocab_size, args.rounds)
                print(
                    f"{vocab_size:7d}  {num_rows:4d}  {name:12s}  {ours:11.2f}  {theirs:9.2f}  {ratio:17.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
