"""Headrace against mlx_lm.server on one model folder: throughput, latency, start-up and memory.

    uv run python tests/benchmarks/serve.py [--folder FOLDER] [--rounds 5] [--clients 1 4 8]

Each round gives every system the same fresh prompts (about 190 tokens, so that no prefix cache can help) and asks
for 128 greedy tokens over `/v1/completions` streams. A ratio is the median over rounds of Headrace divided by the
baseline in the same round; the order inside a round alternates. A round whose systems delivered unequal token
counts is refused, and said so.

Systems: `headrace`; `mlx-lm` is mlx_lm.server with the same float32 folder and the same fast BLAS; `mlx-lm-stock` is
mlx_lm.server as installed, on the checkpoint form that `--stock-folder` names (default: the same folder).

TTFT is from sending the request to the first non-empty text; TPOT is (end - first text) / (tokens - 1).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from attrs import define, field, frozen

NUM_OUTPUT_TOKENS = 128
STARTUP_TIMEOUT_S = 120.0

SUBJECTS = [
    "the miller",
    "a travelling clerk",
    "the old ferryman",
    "her youngest sister",
    "a quiet engineer",
    "the night watchman",
]
VERBS = ["carried", "measured", "repaired", "described", "followed", "remembered", "painted", "counted"]
OBJECTS = [
    "the broken gate",
    "a wooden bridge",
    "the narrow canal",
    "a letter from the coast",
    "the turning wheel",
    "a map of the valley",
]
TAILS = [
    "before the rain began",
    "while the river was low",
    "without saying a word",
    "as the lamps were lit",
    "in the last week of autumn",
]


def make_prompt(rng: random.Random) -> str:
    """Write a passage of about 190 SmolLM2 tokens that no earlier prompt starts with."""
    passage = " ".join(sentence(rng) for _ in range(9))
    return f"{passage} This is a long story about a mill and a river, and it goes on: "


def sentence(rng: random.Random) -> str:
    deed = f"{rng.choice(VERBS)} {rng.choice(OBJECTS)} {rng.choice(TAILS)}"
    return f"In the year {rng.randint(1000, 1999)}, {rng.choice(SUBJECTS)} {deed}."


@frozen
class System:
    """A server program under test."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]


@frozen
class StreamTimes:
    """One stream as its client saw it."""

    ttft_s: float
    tpot_s: float
    num_tokens: int


@define
class Measurements:
    """All rounds of one system at one number of clients."""

    tokens_per_s: list[float] = field(factory=list)
    streams: list[StreamTimes] = field(factory=list)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def process_tree(pid: int) -> list[int]:
    """List a process and its descendants (Linux)."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found.extend(int(child) for child in children.read_text().split())
    return found


def peak_rss_bytes(pid: int) -> int:
    """Sum the peak resident sizes of a process tree; 0 where /proc is missing."""
    total = 0
    for member in process_tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total


@define
class Server:
    """A running system."""

    system: System
    process: subprocess.Popen[bytes]
    url: str
    answering_s: float
    first_token_s: float


@contextlib.contextmanager
def running(system: System) -> Iterator[Server]:
    """Start a system, wait until it answers a one-token completion, and stop it at the end."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = tempfile.NamedTemporaryFile(prefix=f"{system.name}-", suffix=".log", delete=False)  # noqa: SIM115
    signal_path = "/ready" if system.name == "headrace" else "/health"
    body = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}
    # One client for all polls: to make one takes a core 30 ms, which the starting server would miss.
    client = httpx.Client(base_url=url, timeout=60)
    started = time.perf_counter()
    process = subprocess.Popen(
        [part.replace("{port}", str(port)) for part in system.command],
        env={**os.environ, **system.environment},
        stdout=log,
        stderr=log,
    )
    try:
        answering = wait_until(process, lambda: client.get(signal_path), log.name)
        wait_until(process, lambda: client.post("/v1/completions", json=body), log.name)
        yield Server(system, process, url, answering - started, time.perf_counter() - started)
    finally:
        client.close()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(process: subprocess.Popen[bytes], ask: Callable[[], httpx.Response], log: str) -> float:
    deadline = time.perf_counter() + STARTUP_TIMEOUT_S
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"server ended with {process.returncode}; see {log}")
        with contextlib.suppress(httpx.TransportError):
            if ask().status_code == 200:
                return time.perf_counter()
        time.sleep(0.01)
    raise SystemExit(f"server is not ready after {STARTUP_TIMEOUT_S} s; see {log}")


async def stream_once(client: httpx.AsyncClient, url: str, prompt: str) -> StreamTimes:
    """Stream one completion and time it."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    first = last = None
    num_tokens = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices") and chunk["choices"][0].get("text"):
                last = time.perf_counter()
                first = first or last
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
    if first is None or last is None:
        raise SystemExit("a stream delivered no text")
    return StreamTimes(first - sent, (last - first) / max(num_tokens - 1, 1), num_tokens)


async def drive(url: str, prompts: list[str]) -> tuple[float, list[StreamTimes]]:
    """Send all prompts at once; return wall seconds and each stream's times."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        started = time.perf_counter()
        streams = await asyncio.gather(*(stream_once(client, url, prompt) for prompt in prompts))
        return time.perf_counter() - started, list(streams)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def measure(servers: list[Server], num_clients: int, num_rounds: int, rng: random.Random) -> dict[str, Measurements]:
    """Run interleaved rounds; refuse those with unequal token counts."""
    results = {server.system.name: Measurements() for server in servers}
    accepted = 0
    for attempt in range(num_rounds * 3):
        if accepted == num_rounds:
            break
        prompts = [make_prompt(rng) for _ in range(num_clients)]
        order = servers if attempt % 2 == 0 else servers[::-1]
        round_ = {server.system.name: asyncio.run(drive(server.url, prompts)) for server in order}
        counts = {name: sum(stream.num_tokens for stream in streams) for name, (_, streams) in round_.items()}
        if len(set(counts.values())) > 1:
            print(f"  refused a round with unequal token counts: {counts}", flush=True)
            continue
        accepted += 1
        for name, (wall_s, streams) in round_.items():
            results[name].tokens_per_s.append(counts[name] / wall_s)
            results[name].streams.extend(streams)
    if accepted < num_rounds:
        raise SystemExit(f"only {accepted} of {num_rounds} rounds had equal token counts")
    return results


def report(results: dict[str, Measurements], num_clients: int) -> None:
    """Print medians, percentiles and the ratios to Headrace."""
    heads = ("tok/s", "TTFT p50", "p95 (s)", "TPOT p50", "p95 (ms)", "headrace / it", "min", "max")
    print(f"\n{f'{num_clients} client(s)':<14}" + "".join(f"{head:>14}" for head in heads))
    mine = results["headrace"].tokens_per_s
    for name, measured in results.items():
        ttft = [stream.ttft_s for stream in measured.streams]
        tpot = [stream.tpot_s * 1e3 for stream in measured.streams]
        pairs = [ours / theirs for ours, theirs in zip(mine, measured.tokens_per_s, strict=True)]
        figures = [
            statistics.median(measured.tokens_per_s),
            *(percentile(ttft, share) for share in (0.5, 0.95)),
            *(percentile(tpot, share) for share in (0.5, 0.95)),
            *((statistics.median(pairs), min(pairs), max(pairs)) if name != "headrace" else ()),
        ]
        print(f"{name:<14}" + "".join(f"{figure:14.2f}" for figure in figures), flush=True)


def measure_start(systems: list[System], num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Start and stop every system in turn; seconds until its readiness signal and until the first token."""
    times: dict[str, list[tuple[float, float]]] = {system.name: [] for system in systems}
    for _ in range(num_rounds):
        for system in systems:
            with running(system) as server:
                times[system.name].append((server.answering_s, server.first_token_s))
    return times


def systems_for(arguments: argparse.Namespace) -> list[System]:
    with_blas = (
        "from headrace_models import enable_fast_blas; enable_fast_blas(); "
        "import runpy, sys; sys.argv[0] = 'mlx_lm.server'; runpy.run_module('mlx_lm.server', run_name='__main__')"
    )
    mlx_lm = ("--port", "{port}", "--log-level", "ERROR")
    threads = {
        "MKL_NUM_THREADS": str(arguments.threads),
        "OPENBLAS_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
    }
    return [
        System(
            "headrace",
            (sys.executable, "-m", "headrace_chat_server", "serve", arguments.folder, "--port", "{port}"),
            threads,
        ),
        System("mlx-lm", (sys.executable, "-c", with_blas, "--model", arguments.folder, *mlx_lm), threads),
        System(
            "mlx-lm-stock",
            (sys.executable, "-m", "mlx_lm.server", "--model", arguments.stock_folder or arguments.folder, *mlx_lm),
            threads,
        ),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="float32 model folder; default: export the starter model to a temporary one")
    parser.add_argument("--stock-folder", help="checkpoint folder of mlx-lm-stock")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--threads", type=int, default=2, help="threads of the BLAS")
    parser.add_argument("--without", nargs="*", default=[], choices=["mlx-lm", "mlx-lm-stock"])
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.folder is None:
            arguments.folder = str(Path(scratch) / "starter-float32")
            command = [
                sys.executable,
                "-m",
                "headrace_chat_server",
                "export",
                "smollm2-135m",
                arguments.folder,
                "--dtype",
                "float32",
            ]
            subprocess.run(command, check=True)
        systems = [system for system in systems_for(arguments) if system.name not in arguments.without]
        if arguments.starts:
            for name, times in measure_start(systems, arguments.starts).items():
                ready, first = (statistics.median(column) for column in zip(*times, strict=True))
                print(f"{name:<14} ready after {ready:.2f} s, first token after {first:.2f} s (medians)", flush=True)
        rng = random.Random(arguments.seed)
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(running(system)) for system in systems]
            for num_clients in arguments.clients:
                report(measure(servers, num_clients, arguments.rounds, rng), num_clients)
            for server in servers:
                print(f"{server.system.name:<14} peak RSS {peak_rss_bytes(server.process.pid) / 1e6:8.0f} MB")


if __name__ == "__main__":
    main()
