"""`fit` against what a model really takes: peak memory of fresh processes, prefill and decode.

    uv run python tests/benchmarks/fit.py [--models smollm2-135m] [--cases 1300x2 700x3] [--schemes off 8 4]

Each line runs the engine in a process of its own: R rows are prefilled in chunks and decode to N tokens. "device" is
the peak of MLX's allocations, "process" the peak of resident memory (Linux). The exit code is 1 unless each
prediction is at most 2 % under and at most 15 % over what was measured.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

_UNDER, _OVER = -0.02, 0.15
_NUM_DECODED = 8


def source_of(name):
    """A path, a hub id or a packaged model; Gemma where the tests have joined it."""
    from platformdirs import user_cache_path

    from headrace_models import ModelSource, resolve

    if name != "gemma3-270m":
        return resolve(name)
    path = user_cache_path("headrace") / "models" / "gemma3-270m-joined" / "gemma-3-270m-q4_k_m.gguf"
    return ModelSource(name=name, path=path, format="gguf")


def peak_rss():
    if sys.platform != "linux":
        return 0
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(name, num_tokens, rows, scheme, dtype):
    """Run one case in this process and return both peaks."""
    from headrace_models import enable_fast_blas, map_large_blocks

    enable_fast_blas()
    map_large_blocks()
    import mlx.core as mx

    from headrace_kvcache import KVScheme
    from headrace_models import load
    from headrace_sampling import SamplingParams
    from headrace_scheduling import Engine, GenerateOptions

    source, chance = source_of(name), random.Random(5)
    options = GenerateOptions(max_tokens=_NUM_DECODED, sampling=SamplingParams(temperature=0.0))
    with Engine.open(
        lambda: load(source, dtype=dtype), max_rows=rows, kv_scheme=KVScheme.parse(scheme), prompt_cache_bytes=0
    ) as engine:
        length = num_tokens - _NUM_DECODED
        prompts = [[chance.randrange(300, engine.info.vocab_size) for _ in range(length)] for _ in range(rows)]
        engine.generate(prompts, options)
    return {"device": mx.get_peak_memory(), "process": peak_rss()}


def predict(name, num_tokens, rows, scheme, dtype):
    """Ask `fit`, from headers alone."""
    from headrace_kvcache import KVScheme
    from headrace_models.fitting import fit_source

    return fit_source(source_of(name), num_tokens=num_tokens, rows=rows, scheme=KVScheme.parse(scheme), dtype=dtype)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--cases", nargs="+", default=["1300x2", "700x3"], metavar="NxR")
    parser.add_argument("--schemes", nargs="+", default=["off", "8", "4"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, num_tokens, rows, scheme = options.child
        print(json.dumps(measure(name, int(num_tokens), int(rows), scheme, options.dtype)))
        return 0
    within = True
    print(
        "| model | rows x tokens | KV | device: predicted | measured | error | process: predicted | measured | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.models:
        for case in options.cases:
            num_tokens, rows = case.split("x")
            for scheme in options.schemes:
                command = [
                    sys.executable,
                    __file__,
                    "--dtype",
                    options.dtype,
                    "--child",
                    name,
                    num_tokens,
                    rows,
                    scheme,
                ]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found = json.loads(output.splitlines()[-1])
                report = predict(name, int(num_tokens), int(rows), scheme, options.dtype)
                pairs = [(report.device_bytes, found["device"])]
                if found["process"]:
                    pairs.append((report.total_bytes, found["process"]))
                errors = [predicted / measured - 1 for predicted, measured in pairs]
                cells = [
                    f"{predicted / 1e6:,.0f} MB | {measured / 1e6:,.0f} MB | {error:+.1%}"
                    for (predicted, measured), error in zip(pairs, errors, strict=True)
                ]
                within = within and all(_UNDER <= error <= _OVER for error in errors)
                print(f"| {name} | {rows} x {num_tokens} | {scheme} | {' | '.join(cells)} |", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
