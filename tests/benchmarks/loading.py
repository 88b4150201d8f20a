"""Loading of Headrace against mlx_lm.load on the same folder: time and memory, each in a process of its own.

    uv run python tests/benchmarks/loading.py FOLDER_OR_GGUF [...] [--rounds 7]

`whole` is the call that a program makes, with tokenizer; `weights` is the model alone. Both sides hold the weights in
the folder's own form, plain or packed; `float32` is Headrace's model alone, dequantized, which has no counterpart.
mlx-lm reads no GGUF files, so these have Headrace's figures alone. Imports are not timed. A ratio is the median over
rounds of Headrace divided by mlx-lm in the same round; the order inside a round alternates, and a first round, which
fills the page cache, is dropped.

Peak and final memory are the process's own (`VmHWM`, `VmRSS`) less what it had before loading (Linux only).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from attrs import frozen

Run = Callable[[Path], object]


@frozen
class Sample:
    """One load in a fresh process."""

    seconds: float
    peak_mb: float
    final_mb: float


def status_mb(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024 / 1e6


def headrace_whole() -> Run:
    import mlx.core  # noqa: F401

    from headrace_models import load

    return lambda folder: load(folder, dtype="checkpoint")


def build_weights(name: Path, *, is_float32: bool) -> object:
    import mlx.core as mx

    from headrace_models import read_config, resolve
    from headrace_models.building import build_dense
    from headrace_models.weights import WeightForm, open_checkpoint

    source = resolve(name)
    config = read_config(source)
    checkpoint = open_checkpoint(source, config)
    checkpoint.form = WeightForm(dtype=mx.float32 if is_float32 else checkpoint.dtype, keep_packed=not is_float32)
    return build_dense(config, checkpoint, on_gpu=False)


def headrace_weights() -> Run:
    import headrace_models.building  # noqa: F401

    return partial(build_weights, is_float32=False)


def headrace_float32() -> Run:
    import headrace_models.building  # noqa: F401

    return partial(build_weights, is_float32=True)


def mlx_lm_whole() -> Run:
    from mlx_lm import load

    return lambda folder: load(str(folder))


def mlx_lm_weights() -> Run:
    from mlx_lm.utils import load_model

    return load_model


SYSTEMS: dict[str, Callable[[], Run]] = {
    "headrace-whole": headrace_whole,
    "headrace-weights": headrace_weights,
    "headrace-float32": headrace_float32,
    "mlx-lm-whole": mlx_lm_whole,
    "mlx-lm-weights": mlx_lm_weights,
}


def measure_here(system: str, folder: Path) -> None:
    """Load in this process and print a sample as JSON."""
    run = SYSTEMS[system]()
    before_mb = status_mb("VmRSS")
    start = time.perf_counter()
    kept = run(folder)
    seconds = time.perf_counter() - start
    sample = {"seconds": seconds, "peak_mb": status_mb("VmHWM") - before_mb, "final_mb": status_mb("VmRSS") - before_mb}
    del kept
    sys.stdout.write(json.dumps(sample) + "\n")


def measure(system: str, folder: Path) -> Sample:
    command = [sys.executable, __file__, str(folder), "--child", system]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return Sample(**json.loads(done.stdout.splitlines()[-1]))


def compare(folder: Path, num_rounds: int) -> None:
    systems = [name for name in SYSTEMS if folder.is_dir() or name.startswith("headrace")]
    samples: dict[str, list[Sample]] = {name: [] for name in systems}
    for index in range(num_rounds + 1):
        for name in systems if index % 2 else reversed(systems):
            sample = measure(name, folder)
            if index:
                samples[name].append(sample)
    sys.stdout.write(f"{folder.name}\n")
    for name, found in samples.items():
        seconds = statistics.median(sample.seconds for sample in found)
        peak_mb = statistics.median(sample.peak_mb for sample in found)
        final_mb = statistics.median(sample.final_mb for sample in found)
        sys.stdout.write(
            f"  {name:17} {seconds:6.3f} s   peak {peak_mb:6.0f} MB   final {final_mb:6.0f} MB   "
            f"peak / final {peak_mb / final_mb:.2f}\n"
        )
    for part in ("whole", "weights") if folder.is_dir() else ():
        pairs = zip(samples[f"headrace-{part}"], samples[f"mlx-lm-{part}"], strict=True)
        ratios = [ours.seconds / theirs.seconds for ours, theirs in pairs]
        sys.stdout.write(
            f"  {part}, headrace / mlx-lm: {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})\n"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--child", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for folder in arguments.folders:
        if arguments.child:
            measure_here(arguments.child, folder)
        else:
            compare(folder, arguments.rounds)


if __name__ == "__main__":
    main()
