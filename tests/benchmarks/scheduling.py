"""Headrace against mlx_lm.server where scheduling decides: mixed lengths, seeded rows, short behind long, later turns.

    uv run python tests/benchmarks/scheduling.py [--folder FOLDER] [--rounds 5] [--only mixed8 seeded ...]

Both systems serve one float32 folder with the same fast BLAS, and every round asks both the same, in alternating
order. A ratio is the median over rounds of Headrace divided by mlx_lm.server in the same round.

- `mixed8`, `mixed16`: so many streams with prompts of 64 to 2,000 tokens and 64 greedy tokens each: tokens per second.
- `seeded`: 8 streams of 64 + 128 tokens, two of them sampled with a seed of their own: tokens per second;
  `logprobs`: the same with log-probabilities of those two.
- `short`: time to first token of prompts of 64 tokens that arrive while one of 4,000 is computed.
- `turns`: time to first token of a chat at 3,000 tokens of history: cold, the next turn, and that turn edited.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from attrs import frozen
from serve import Server, running, sentence, systems_for

TOKENS_PER_SENTENCE = 20.5
# Of 16 connections at once mlx_lm.server breaks some: its listener holds five that wait.
CONNECTION_GAP_S = 0.05


@frozen
class Reply:
    """One answer as its client saw it: seconds to the first text, tokens, and the whole text."""

    ttft_s: float
    num_tokens: int
    text: str
    num_cached: int


def passage(rng: random.Random, num_tokens: int) -> str:
    """Write about so many SmolLM2 tokens that no earlier prompt starts with."""
    return " ".join(sentence(rng) for _ in range(max(1, round(num_tokens / TOKENS_PER_SENTENCE))))


async def ask(client: httpx.AsyncClient, server: Server, body: dict[str, Any]) -> Reply:
    """Stream one completion or chat."""
    route = "chat/completions" if "messages" in body else "completions"
    body = {"temperature": 0, **body, "stream": True, "stream_options": {"include_usage": True}}
    sent = time.perf_counter()
    first, text, usage = None, [], {}
    async with client.stream("POST", f"{server.url}/v1/{route}", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            for choice in chunk.get("choices") or ():
                delta = choice.get("text") or choice.get("delta", {}).get("content")
                if delta:
                    first = first or time.perf_counter()
                    text.append(delta)
            usage = chunk.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Reply((first or time.perf_counter()) - sent, usage.get("completion_tokens", 0), "".join(text), cached)


async def ask_all(server: Server, bodies: Sequence[dict[str, Any]], delays: Sequence[float] = ()) -> list[Reply]:
    async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=None)) as client:

        async def one(body: dict[str, Any], delay: float) -> Reply:
            await asyncio.sleep(delay)
            return await ask(client, server, body)

        waits = delays or [0.0] * len(bodies)
        return list(await asyncio.gather(*(one(body, wait) for body, wait in zip(bodies, waits, strict=True))))


def tokens_per_s(server: Server, bodies: Sequence[dict[str, Any]]) -> float:
    started = time.perf_counter()
    replies = asyncio.run(ask_all(server, bodies, [CONNECTION_GAP_S * index for index in range(len(bodies))]))
    return sum(reply.num_tokens for reply in replies) / (time.perf_counter() - started)


def interleave(servers: list[Server], rounds: range, measure: Callable[[Server, int], float]) -> dict[str, list[float]]:
    """Measure every system in every round, in alternating order; `measure` gets the round's number."""
    found: dict[str, list[float]] = {server.system.name: [] for server in servers}
    for number in rounds:
        for server in servers if number % 2 == 0 else servers[::-1]:
            found[server.system.name].append(value := measure(server, number))
            print(f"  round {number}, {server.system.name}: {value:.3f}", flush=True)
    return found


def report(what: str, found: dict[str, list[float]], unit: str) -> None:
    ours, theirs = found["headrace"], found["mlx-lm"]
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    print(
        f"{what:<44} {statistics.median(ours):9.2f} {statistics.median(theirs):9.2f} {unit:<6}"
        f" ratio {statistics.median(ratios):6.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def mixed(servers: list[Server], rounds: range, num_streams: int) -> None:
    lengths = [round(64 * (2000 / 64) ** (index / (num_streams - 1))) for index in range(num_streams)]

    def measure(server: Server, number: int) -> float:
        rng = random.Random(1000 * num_streams + number)
        rng.shuffle(shuffled := list(lengths))
        return tokens_per_s(server, [{"prompt": passage(rng, length), "max_tokens": 64} for length in shuffled])

    report(f"{num_streams} streams, prompts of 64 to 2,000", interleave(servers, rounds, measure), "tok/s")


def seeded(servers: list[Server], rounds: range) -> None:
    _seeded(servers, rounds, "8 streams of 64 + 128, two seeded", {})


def logprobs(servers: list[Server], rounds: range) -> None:
    _seeded(servers, rounds, "8 streams, two seeded with log-probabilities", {"logprobs": 1})


def _seeded(servers: list[Server], rounds: range, name: str, extra: dict[str, Any]) -> None:
    def measure(server: Server, number: int) -> float:
        rng = random.Random(5000 + 100 * len(extra) + number)
        bodies: list[dict[str, Any]] = [{"prompt": passage(rng, 64), "max_tokens": 128} for _ in range(8)]
        for index in (2, 5):
            bodies[index] |= {"seed": number * 10 + index, "temperature": 0.8, **extra}
        return tokens_per_s(server, bodies)

    report(name, interleave(servers, rounds, measure), "tok/s")


def short(servers: list[Server], rounds: range) -> None:
    worst: dict[str, list[float]] = {server.system.name: [] for server in servers}

    def measure(server: Server, number: int) -> float:
        rng = random.Random(9000 + number)
        bodies = [{"prompt": passage(rng, 4000), "max_tokens": 1}]
        bodies += [{"prompt": passage(rng, 64), "max_tokens": 4} for _ in range(6)]
        replies = asyncio.run(ask_all(server, bodies, [0.0, *(0.5 + 0.7 * index for index in range(6))]))
        times = [reply.ttft_s for reply in replies[1:]]
        worst[server.system.name].extend(times)
        return max(times)

    report("TTFT of 64 tokens behind 4,000, worst", interleave(servers, rounds, measure), "s")
    p95 = {name: sorted(times)[round(0.95 * (len(times) - 1))] for name, times in worst.items()}
    print(f"  p95 over all rounds: {p95}, ratio {p95['headrace'] / p95['mlx-lm']:.3f}", flush=True)


def turns(servers: list[Server], rounds: range) -> None:
    times: dict[str, dict[str, list[float]]] = {
        kind: {server.system.name: [] for server in servers} for kind in ("cold", "next", "edited")
    }

    def measure(server: Server, number: int) -> float:
        rng = random.Random(13_000 + number)
        messages = [{"role": "user", "content": passage(rng, 3000)}]
        replies: dict[str, Reply] = {}

        def say(kind: str, content: str | None, *, keeps: bool = True) -> None:
            asked = messages if content is None else [*messages, {"role": "user", "content": content}]
            (reply,) = asyncio.run(ask_all(server, [{"messages": asked, "max_tokens": 16}]))
            replies[kind] = reply
            times[kind][server.system.name].append(reply.ttft_s)
            if keeps:
                messages[:] = [*asked, {"role": "assistant", "content": reply.text}]

        say("cold", None)
        say("next", passage(rng, 20), keeps=False)
        say("edited", passage(rng, 20), keeps=False)
        print(f"  {server.system.name}: cached {[(kind, reply.num_cached) for kind, reply in replies.items()]}")
        return 0.0

    interleave(servers, rounds, measure)
    for kind, found in times.items():
        report(f"TTFT at 3,000 tokens, {kind}", found, "s")
    for name in times["cold"]:
        shares = [late / cold for late, cold in zip(times["next"][name], times["cold"][name], strict=True)]
        print(f"  {name}: next turn / cold = 1 / {1 / statistics.median(shares):.1f}", flush=True)


@contextmanager
def exported(folder: str | None) -> Iterator[str]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        made = str(Path(scratch) / "starter-float32")
        command = [sys.executable, "-m", "headrace_chat_server", "export", "smollm2-135m", made, "--dtype", "float32"]
        subprocess.run(command, check=True)
        yield made


def main() -> None:
    measures = {
        "mixed8": partial(mixed, num_streams=8),
        "mixed16": partial(mixed, num_streams=16),
        "seeded": seeded,
        "logprobs": logprobs,
        "short": short,
        "turns": turns,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="float32 model folder; default: export the starter model to a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first round, to go on from an earlier run")
    parser.add_argument("--threads", type=int, default=2, help="threads of the BLAS")
    parser.add_argument("--only", nargs="+", choices=measures, default=list(measures))
    arguments = parser.parse_args()
    with exported(arguments.folder) as folder:
        arguments.folder, arguments.stock_folder = folder, None
        systems = [system for system in systems_for(arguments) if system.name != "mlx-lm-stock"]
        with ExitStack() as stack:
            servers = [stack.enter_context(running(system)) for system in systems]
            for name in arguments.only:
                measures[name](servers, range(arguments.first, arguments.first + arguments.rounds))


if __name__ == "__main__":
    main()
