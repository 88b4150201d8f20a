"""The command `headrace doctor`: what this machine is, how fast it measures, and what follows from that."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_chat_server.console import say, table
from headrace_chat_server.models import require_backend

if TYPE_CHECKING:
    from headrace_models.device import BlasReport, DeviceMeasurement

_THREAD_VARIABLES = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def run_doctor() -> int:
    """Measure and print; 0 when the device is as fast as it should be, else 1."""
    require_backend()
    from headrace_models import enable_fast_blas, measure

    blas = enable_fast_blas()
    measured = measure()
    table(describe(blas, measured, os.environ), title="This machine")
    if measured.advice is None:
        say("As fast as it should be.")
        return 0
    say(f"Slow: {measured.advice}")
    return 1


def describe(blas: "BlasReport", measured: "DeviceMeasurement", environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """List facts and figures by name, for people."""
    device = measured.profile
    threads = [f"{name}={environ[name]}" for name in _THREAD_VARIABLES if name in environ]
    return [
        ("device", f"{device.kind}: {device.name}"),
        ("memory", f"{device.memory_bytes / 1e9:.1f} GB"),
        ("processors", str(device.num_cpus)),
        ("BLAS", f"{blas.name} ({blas.path})" if blas.loaded else "MLX's own"),
        ("why this BLAS", blas.reason),
        ("BLAS threads", ", ".join(threads) or "the library's default, one per physical core"),
        ("matrix product", f"{measured.gflops:.0f} GFLOP/s in float32"),
        ("matrix-vector product", f"{measured.matrix_vector_gbps:.1f} GB/s, which bounds decoding"),
        ("weights will be held as", measured.representation),
        ("why this form", measured.reason),
    ]
