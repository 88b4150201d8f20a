"""How soon Whisper is back after it was unloaded, and what its server keeps while it is not there.

    uv run python tests/benchmarks/whisper_reload.py [--models whisper-base whisper-tiny.en] [--rounds 7]

A reload is from asking `TranscriptionService` for the model to its being there: start of the process, imports, BLAS,
weights, tokenizer. Files are in the page cache after a first, unmeasured load. Resident memory is that of all processes
of `headrace-transcribe` after it transcribed a clip and unloaded.
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from headrace_models.transcription import TranscriptionService, WhisperLoader
from headrace_models.whisper.sources import resolve_whisper

CLIP = Path(__file__).parent.parent / "models" / "speech" / "austen-0880.wav"
START_S, PAUSE_S = 60.0, 0.3


async def reloads(name: str, num_rounds: int) -> list[tuple[float, float]]:
    """Return seconds of each reload, and those that loading takes in the process."""
    service = TranscriptionService(WhisperLoader(source=resolve_whisper(name)), model_id=name, idle_unload_s=None)
    found: list[tuple[float, float]] = []
    try:
        for index in range(num_rounds + 1):
            start = time.perf_counter()
            await service.load()
            sample = time.perf_counter() - start, service.stats().last_load_s
            await service.unload()
            # The old process goes first, as it does when a model was idle.
            await asyncio.sleep(PAUSE_S)
            if index:
                print(f"{name} round {index}: {sample[0]:.3f} s, of which loading {sample[1]:.3f} s", flush=True)
                found.append(sample)
    finally:
        await service.close()
    return found


def resident_mb(pid: int) -> float:
    """Return resident memory of a process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6 + sum(resident_mb(int(child)) for child in children)


def idle_mb(name: str) -> float:
    """Return what a server keeps after it transcribed and unloaded."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headrace_transcription_server", name, "--port", str(port), "--idle-unload", "0"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            wait_ready(client)
            answer = client.post(
                "/v1/audio/transcriptions", files={"file": (CLIP.name, CLIP.read_bytes())}, data={"model": name}
            )
            answer.raise_for_status()
            time.sleep(2)
        return resident_mb(server.pid)
    finally:
        server.terminate()
        server.wait()


def wait_ready(client: httpx.Client) -> None:
    end = time.perf_counter() + START_S
    while time.perf_counter() < end:
        try:
            client.get("/health").raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"the server does not answer after {START_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["whisper-base", "whisper-tiny.en"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for name in options.models:
        found = asyncio.run(reloads(name, options.rounds))
        whole, loading = (statistics.median(values) for values in zip(*found, strict=True))
        least, most = min(found)[0], max(found)[0]
        print(f"{name}: reload {whole:.2f} s ({least:.2f} to {most:.2f}), of which loading {loading:.2f} s", flush=True)
        print(f"{name}: idle after unloading {idle_mb(name):.0f} MB", flush=True)


if __name__ == "__main__":
    main()
