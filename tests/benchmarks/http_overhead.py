"""What serving costs beside the model: CPU time per streamed token, and idle to first token (Linux).

    uv run python tests/benchmarks/http_overhead.py [--tokens 2000] [--requests 100] [--step-ms 0 4]

The whole product runs, engine child included, on the null model of the design's section 6, whose forward returns one
cached array. CPU time is the serving process's own from /proc, all threads, in Python and in the kernel, which also
carries each chunk to its client on loopback, divided by the tokens that the clients got; the engine's process and the
clients, which run beside it, are not in it. Without a step time the engine is faster than any device, and tokens of
several steps may share a chunk; with one, each token is a chunk and finds an idle process with cold caches.
Idle to first token is one short request at a time, from sending it to the first text.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import httpx
import uvloop
from attrs import frozen

from headrace_chat_server.composition import compose
from headrace_chat_server.http_server import HttpServer
from headrace_chat_server.settings import build
from headrace_chat_server.stop_signals import stop_signals
from headrace_chat_server.text_side import TextSide
from headrace_http_api import SamplingDefaults
from headrace_models import ModelSource
from headrace_scheduling.testing import FakeCodec, ModelLoaderFake, NullModel


class ByteCodec(FakeCodec):
    """Bytes; completions only."""

    has_chat_template = False
    special_tokens: ClassVar = {}

    def prepare_chat(self, messages: object, **options: object) -> object:
        raise ValueError("the null model has no chat template")

    render_chat = prepare_chat

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text)

    def decode(self, token_ids: object, *, skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids)


async def serve(fd: int, step_ms: float) -> None:
    """Serve the null model on a listening socket until SIGINT."""
    listener = socket.socket(fileno=fd)
    composition = compose(
        # The null model keeps nothing that could be stored.
        build({"engine.prompt_cache": 0}),
        ModelSource(name="null", path=Path("null"), format="folder"),
        loader=ModelLoaderFake(partial(NullModel, step_s=step_ms / 1e3)),
        load_text=lambda: TextSide(codec=ByteCodec(), sampling_defaults=SamplingDefaults(temperature=0.0)),
    )
    with stop_signals() as signals:
        await composition.start()
        try:
            ready = asyncio.create_task(composition.wait_ready())
            app = composition.make_app()
            server = HttpServer(
                app, gateway=composition.gateway, signals=signals, drain_timeout_s=5.0, log_level="warning"
            )
            await server.run(listener)
            await ready
        finally:
            await composition.close()


@frozen
class Served:
    """A running server process."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """User and system time of the process's threads so far; nanoseconds, where /proc/PID/stat counts ticks."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextlib.contextmanager
def running(step_ms: float) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, __file__, "--serve", str(listener.fileno()), "--step-ms", str(step_ms)]
        process = subprocess.Popen(command, pass_fds=(listener.fileno(),))
    try:
        while httpx.get(f"{url}/ready", timeout=30).status_code != 200:
            time.sleep(0.05)
        yield Served(url, process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


async def stream(client: httpx.AsyncClient, url: str, num_tokens: int) -> tuple[int, int, float]:
    """Stream one completion; return its tokens, its chunks of text and the seconds until the first text."""
    body = {
        "prompt": "Hello",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, first, num_chunks, counted = time.perf_counter(), 0.0, 0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                num_chunks += 1
                if not first and chunk["choices"] and chunk["choices"][0]["text"]:
                    first = time.perf_counter() - sent
                if chunk.get("usage"):
                    counted = chunk["usage"]["completion_tokens"]
    return counted, num_chunks, first


async def measure_streams(served: Served, num_streams: int, num_tokens: int) -> None:
    async with httpx.AsyncClient(timeout=300) as client:
        before = served.cpu_s()
        results = await asyncio.gather(*(stream(client, served.url, num_tokens) for _ in range(num_streams)))
        spent = served.cpu_s() - before
    tokens, chunks = sum(result[0] for result in results), sum(result[1] for result in results)
    print(
        f"{num_streams} stream(s): {spent / tokens * 1e6:6.1f} us of CPU per token, "
        f"{spent / chunks * 1e6:6.1f} us per chunk ({tokens} tokens, {chunks} chunks)"
    )


async def measure_first_tokens(served: Served, num_requests: int) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        times = [(await stream(client, served.url, 1))[2] * 1e3 for _ in range(num_requests)]
    ordered = sorted(times)
    print(
        f"idle to first token: median {statistics.median(times):.2f} ms, p95 {ordered[int(0.95 * len(times))]:.2f} ms"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens per stream")
    parser.add_argument("--requests", type=int, default=100, help="requests for idle to first token")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0, 4], help="step times of the engine")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(arguments.serve, *arguments.step_ms))
        return
    for step_ms in arguments.step_ms:
        print(f"a step takes {step_ms:g} ms:")
        with running(step_ms) as served:
            asyncio.run(measure_first_tokens(served, 5))
            asyncio.run(measure_first_tokens(served, arguments.requests))
            for num_streams in (1, 8):
                asyncio.run(measure_streams(served, num_streams, arguments.tokens))


if __name__ == "__main__":
    main()
