"""Print the engine's own time per step with a model that computes nothing (design 6).

    python tests/benchmarks/step_overhead.py [--rows 1 8] [--steps 2000] [--vocab 49152]

Per number of rows: the median time of a whole step of the engine (scheduler, runner, sampler, text, events), and of
its parts. "graph" is building and running what a step asks of mlx even with this model (token ids, argmax, one read),
measured apart with the same arrays; limits are for the engine's step beyond it. Seeded rows also pay for arithmetic
over the vocabulary, which is the device's and not the engine's: `--vocab 256` shows what is left without it.
"""

import argparse
import itertools
import statistics
import time
from functools import partial

import mlx.core as mx

from headrace_sampling import SamplingParams
from headrace_scheduling import EngineConfig, GenerateOptions, GenerationRequest, Stop, Submit
from headrace_scheduling.assembly import make_loop
from headrace_scheduling.inbox import Inbox
from headrace_scheduling.runner import make_mlx_runner
from headrace_scheduling.testing import ModelLoaderFake, NullModel
from headrace_scheduling.testing.loading import FakeFacts

_LIMITS_MS = {1: 0.3, 8: 1.0}


class _Clocked:
    """A step runner that adds up the time spent in it, per step."""

    def __init__(self, runner):
        self._runner = runner
        self.spent = 0.0

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def dispatch(self, step):
        begin = time.perf_counter()
        self._runner.dispatch(step)
        self.spent += time.perf_counter() - begin

    def collect(self):
        begin = time.perf_counter()
        result = self._runner.collect()
        self.spent += time.perf_counter() - begin
        return result


def measure_engine(num_rows, num_steps, vocab_size, params):
    """Return the medians, in ms, of a decode step and of the runner's part of it."""
    facts = FakeFacts(vocab_size=vocab_size, eos_token_ids=frozenset(), max_positions=10 * num_steps)
    config = EngineConfig(loader=ModelLoaderFake(partial(NullModel, facts)), max_rows=num_rows)
    loaded = config.loader()
    runner = _Clocked(make_mlx_runner(loaded, config))
    inbox = Inbox()
    times, runner_times = [], []

    def publish(events):
        times.append(time.perf_counter())
        runner_times.append(runner.spent)
        if len(times) >= num_steps:
            inbox.put(Stop())

    options = GenerateOptions(stop=("no such text",), sampling=params)
    for request_id in range(num_rows):
        request = GenerationRequest(prompt_ids=(1, 2, 3), options=options)
        inbox.put(Submit(request_id=request_id, request=request, max_tokens=9 * num_steps))
    make_loop(loaded, runner, config, inbox=inbox, publish=publish).run()
    return _median_gap_ms(times), _median_gap_ms(runner_times)


def measure_graph(num_rows, num_steps, vocab_size):
    """Return the median, in ms, of what mlx needs for such a step without any engine: greedy, one read."""
    model = NullModel(FakeFacts(vocab_size=vocab_size))
    tokens = mx.zeros((num_rows,), dtype=mx.int32)
    times = []
    for _ in range(num_steps):
        times.append(time.perf_counter())
        hidden = model.forward_hidden(tokens[:, None], ())[:, -1:]
        tokens = mx.argmax(model.logits_from_hidden(hidden)[:, -1], axis=-1).astype(mx.int32)
        mx.async_eval(tokens)
        tokens.tolist()
    return _median_gap_ms(times)


def _median_gap_ms(times):
    gaps = [later - earlier for earlier, later in itertools.pairwise(times[20:])]
    return 1000 * statistics.median(gaps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--vocab", type=int, default=49152)
    args = parser.parse_args()
    print("rows  sampling  step ms  runner ms  engine ms  graph ms  beyond graph ms  limit ms")
    for num_rows in args.rows:
        graph = measure_graph(num_rows, args.steps, args.vocab)
        for name, params in (("greedy", SamplingParams()), ("seeded", SamplingParams(temperature=0.7, seed=1))):
            step, runner = measure_engine(num_rows, args.steps, args.vocab, params)
            limit = _LIMITS_MS.get(num_rows, float("nan"))
            print(
                f"{num_rows:4d}  {name:8s}  {step:7.3f}  {runner:9.3f}  {step - runner:9.3f}  {graph:8.3f}"
                f"  {step - graph:15.3f}  {limit:8.1f}"
            )


if __name__ == "__main__":
    main()
