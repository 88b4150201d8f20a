"""Time what a stored prefix costs the next turn of a conversation: the copy into its slot, and the copy out at the end.

    uv run python tests/benchmarks/turn_two.py [smollm2-135m | FILE.gguf] [--history 3000] [--agents 1] [--turns 6]
        [--neighbours 0]

Agents that begin with one text of random tokens take turns on an engine on a thread; each adds a question and a reply
of 8 tokens. TTFT is queue and prefill, as the engine counts them; `whole` is until the last event. `take` finds and
clones, `seat` copies the stored prefix into the row's slot, `copy` takes the row out of its slot when it ends, `put`
stores that. Clocks of `seat` and `copy` stop when the bytes are there, which the engine itself does not wait for.
Medians of each agent's later turns, in milliseconds. At the end all entries are saved to a folder and loaded again.

With neighbours, rows of 64 tokens that decode all the while: `step` is how long they wait for a token, the median, and
`join step` and `leave step` how long when the row with the history joins and when it has left.
"""

import argparse
import bisect
import itertools
import random
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from headrace_models import enable_fast_blas

enable_fast_blas()

import mlx.core as mx  # noqa: E402

from headrace_kvcache import PrefixCache, PrefixFolder  # noqa: E402
from headrace_kvcache.clones import arrays_of  # noqa: E402
from headrace_models import ModelSource, load  # noqa: E402
from headrace_sampling import SamplingParams  # noqa: E402
from headrace_scheduling import (  # noqa: E402
    Engine,
    EngineUnavailable,
    GenerateOptions,
    GenerationCancelled,
    GenerationRequest,
)
from headrace_scheduling.runner import MlxStepRunner  # noqa: E402
from headrace_scheduling.seats import Seats  # noqa: E402

TIMES: dict[str, float] = {}
BEGUN: dict[str, float] = {}
COLLECTED: list[float] = []
STORES: set[PrefixCache] = set()


def clocked(owner, name, arrays):
    """Time a method until what it made is there."""
    method = getattr(owner, name)

    def timed(self, *args, **kwargs):
        begin = time.perf_counter()
        result = method(self, *args, **kwargs)
        mx.eval(arrays(self, result))
        TIMES[name] = TIMES.get(name, 0.0) + (time.perf_counter() - begin) * 1e3
        BEGUN[name] = begin
        if owner is PrefixCache:
            STORES.add(self)
        return result

    setattr(owner, name, timed)


def watch():
    clocked(PrefixCache, "take", lambda _, __: [])
    clocked(Seats, "join", lambda seats, _: seats.batch.arrays)
    clocked(Seats, "copy", lambda _, caches: arrays_of(caches))
    clocked(PrefixCache, "put", lambda _, __: [])
    collect = MlxStepRunner.collect

    def noted(runner):
        result = collect(runner)
        COLLECTED.append(time.perf_counter())
        return result

    MlxStepRunner.collect = noted


class Neighbours:
    """Rows that decode beside the turns until the engine is closed."""

    def __init__(self, engine, num_rows, draw):
        self.engine = engine
        self.prompts = [tuple(draw.randrange(1000, 9000) for _ in range(64)) for _ in range(num_rows)]
        if num_rows:
            threading.Thread(target=self.generate).start()

    def generate(self):
        options = GenerateOptions(max_tokens=4000, ignore_eos=True, sampling=SamplingParams())
        with suppress(EngineUnavailable, GenerationCancelled):
            self.engine.run(
                [GenerationRequest(prompt_ids=ids, options=options, caches_prefix=False) for ids in self.prompts]
            )

    def waits(self):
        """Return how long steps took in milliseconds: the median, and those of the row's joining and leaving."""
        if not self.prompts:
            return {}
        steps = [(after - before) * 1e3 for before, after in itertools.pairwise(COLLECTED)]
        at = {name: bisect.bisect(COLLECTED, BEGUN[name]) - 1 for name in ("join", "copy")}
        return {
            "step": statistics.median(steps),
            "join step": steps[at["join"]],
            "leave step": steps[at["copy"]],
        }


def take_turn(engine, prompt):
    """Return what one turn cost, and its reply."""
    options = GenerateOptions(max_tokens=8, ignore_eos=True, sampling=SamplingParams())
    TIMES.clear()
    COLLECTED.clear()
    begin = time.perf_counter()
    ((result,),) = engine.run([GenerationRequest(prompt_ids=prompt, options=options, stable_boundary=len(prompt))])
    whole = (time.perf_counter() - begin) * 1e3
    # What is copied for the store comes after the end is told.
    time.sleep(0.7)
    stats = result.finished.stats
    found = {"cached": stats.num_cached_tokens, "TTFT": (stats.queue_s + stats.prefill_s) * 1e3, "whole": whole}
    names = {"take": "take", "join": "seat", "copy": "copy", "put": "put"}
    return found | {shown: TIMES.get(name, 0.0) for name, shown in names.items()}, result.token_ids


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    for name, default in (("history", 3000), ("new", 20), ("agents", 1), ("turns", 6), ("neighbours", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    source = args.model
    if Path(source).is_file():
        source = ModelSource(name="file", path=Path(source), format="gguf")
    draw = random.Random(0)
    stem = [draw.randrange(1000, 9000) for _ in range(args.history)]
    histories = [list(stem) for _ in range(args.agents)]
    rows = []
    with Engine.open(partial(load, source)) as engine:
        watch()
        neighbours = Neighbours(engine, args.neighbours, draw)
        for turn in range(args.turns * args.agents):
            history = histories[turn % args.agents]
            history += [draw.randrange(1000, 9000) for _ in range(args.new)]
            time.sleep(0.5 if args.neighbours else 0.0)
            row, reply = take_turn(engine, tuple(history))
            rows.append(row | neighbours.waits())
            history += reply
        (store,) = STORES
        print_folder_times(store)
        print(f"{len(store)} entries, {store.nbytes / 1e6:.1f} MB, each alone {held(store) / 1e6:.1f} MB")
    later = rows[args.agents :]
    print("first turn ", {name: round(value, 1) for name, value in rows[0].items()})
    print("later turns", {name: round(statistics.median(row[name] for row in later), 1) for name in later[0]})
    shares = (statistics.median(row[name] / row["TTFT"] for row in later) for name in ("seat", "copy"))
    print("of the TTFT of a later turn: seat {:.1%}, copy {:.1%}".format(*shares))


def print_folder_times(store):
    """Save all entries to a folder, and load them into another cache."""
    with tempfile.TemporaryDirectory() as path:
        folder = PrefixFolder(path, identity="benchmark", max_bytes=1 << 40)
        saved, again = folder.save(store), folder.save(store)
        loaded = PrefixFolder(path, identity="benchmark", max_bytes=1 << 40).load(PrefixCache(1 << 40))
    seconds = ", ".join(f"{report.duration_s:.3f}" for report in (saved, again, loaded))
    print(f"{saved.num_bytes / 1e6:.1f} MB of files saved, saved again and loaded in {seconds} s")


def held(store):
    """Bytes of all entries if none had any in common."""
    return sum(array.nbytes for view in store.views() for array in arrays_of(view.caches))


if __name__ == "__main__":
    main()
