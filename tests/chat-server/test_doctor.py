"""`headrace doctor` tells what was measured, and what to do about it."""

import os
import subprocess
import sys

import pytest

from headrace_chat_server.doctor import describe
from headrace_models.device import BlasReport, DeviceMeasurement, DeviceProfile

MEASURED = DeviceMeasurement(
    profile=DeviceProfile(kind="cpu", name="a processor", memory_bytes=8_000_000_000, num_cpus=2),
    gflops=123.4,
    matrix_vector_gbps=21.5,
    representation="float32",
    reason="because",
    advice=None,
)


@pytest.mark.parametrize("loaded", [True, False])
def test_every_figure_and_every_reason_is_told(loaded):
    """Device, BLAS, both figures and the form of the weights are there, each with its reason."""
    blas = BlasReport(loaded=loaded, name="mkl" if loaded else None, path="/lib/mkl" if loaded else None, reason="so")
    rows = dict(describe(blas, MEASURED, {"MKL_NUM_THREADS": "1"}))
    text = " ".join(rows.values())
    assert all(
        part in text for part in ("cpu: a processor", "8.0 GB", "123 GFLOP/s", "21.5 GB/s", "float32", "because")
    )
    assert ("mkl (/lib/mkl)" in text) is loaded
    assert rows["why this BLAS"] == "so"
    assert rows["BLAS threads"] == "MKL_NUM_THREADS=1"


def test_the_command_measures_this_machine():
    """The real program prints measured figures, and its exit code says whether something should be installed."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace_chat_server", "doctor"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"MKL_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert done.returncode == (1 if "Slow:" in done.stdout else 0), done.stderr
    assert "GFLOP/s" in done.stdout
    assert "GB/s" in done.stdout
