"""Device: the BLAS is loaded before mlx or not at all, and a report says why."""

import os
import platform
import subprocess
import sys

import pytest

from headrace_models import device
from headrace_models.device import enable_fast_blas, measure, profile

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes its BLAS from the global scope")
WITH_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the option is that of glibc's malloc")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@ON_LINUX
def test_after_mlx_it_is_too_late():
    """Symbols are bound when mlx is imported; pretending otherwise would report a speed that is not there."""
    import mlx.core  # noqa: F401

    report = enable_fast_blas()
    assert not report.loaded
    assert "already imported" in report.reason


@ON_LINUX
def test_without_a_library_the_report_says_what_to_install(tmp_path, monkeypatch):
    """Nothing found is no error: the program runs, slowly, and says so."""
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(device, "_load_global", lambda _path: False)
    report = enable_fast_blas([tmp_path])
    assert (report.loaded, report.name, report.path) == (False, None, None)
    assert "install" in report.reason


@ON_LINUX
def test_mkl_of_the_environment_comes_first(tmp_path, monkeypatch):
    """Then MKL and OpenBLAS of the system, in this order."""
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    tried: list[str] = []
    monkeypatch.setattr(device, "_load_global", lambda path: bool(tried.append(path)))
    (tmp_path / "libmkl_rt.so.2").touch()
    enable_fast_blas([tmp_path])
    assert tried == [str(tmp_path / "libmkl_rt.so.2"), "libmkl_rt.so.3", "libmkl_rt.so.2", "libopenblas.so.0"]
    monkeypatch.setattr(device, "_load_global", lambda path: "openblas" in path)
    assert enable_fast_blas([tmp_path]).name == "openblas"


def test_a_broken_library_is_skipped(tmp_path):
    """A file that is no library does not stop the program."""
    (tmp_path / "libmkl_rt.so.3").write_bytes(b"no library")
    assert not device._load_global(str(tmp_path / "libmkl_rt.so.3"))


def test_the_blas_part_imports_no_mlx():
    """A program calls it before mlx; so the module must not bring mlx in."""
    code = (
        "import sys; from headrace_models.device import enable_fast_blas; enable_fast_blas();"
        "print('mlx' in sys.modules or 'mlx.core' in sys.modules)"
    )
    assert run(code) == "False"


def test_threads_of_the_blas_are_divided_and_given_back(monkeypatch):
    """Each stream gets an equal share, at least one; 1 restores what there was; without a BLAS nothing happens."""
    seen: list[int] = []
    monkeypatch.setattr(device, "_blas_threads", lambda: (seen.append, 6))
    for num_streams in (2, 4, 12, 1):
        device.share_blas(num_streams)
    assert seen == [3, 1, 1, 6]
    monkeypatch.setattr(device, "_blas_threads", lambda: None)
    device.share_blas(2)


@ON_LINUX
def test_the_loaded_blas_follows():
    """The functions are those of the library that was loaded."""
    code = (
        "from headrace_models import device\n"
        "report = device.enable_fast_blas()\n"
        "found = device._blas_threads()\n"
        "print(report.loaded == (found is not None))\n"
        "device.share_blas(10**6)\n"
        "device._blas_threads.cache_clear()\n"
        "print(found is None or device._blas_threads()[1])\n"
    )
    assert run(code).split() in (["True", "1"], ["True", "True"])


def test_interleaving_keeps_a_width_that_is_set(monkeypatch):
    """A user's own setting wins."""
    monkeypatch.setenv("MLX_BFS_MAX_WIDTH", "7")
    device.interleave_streams()
    assert os.environ["MLX_BFS_MAX_WIDTH"] == "7"


# In a heap the first and the last block, which stay, pin those between them.
_PINNED = """
from headrace_models.device import map_large_blocks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

map_large_blocks()
import mlx.core as mx
blocks = [mx.full((2_000_000,), float(index)) for index in range(16)]
mx.eval(blocks)
full, ends = resident(), (blocks[0], blocks[-1])
del blocks
mx.clear_cache()
print(full - resident())
"""


@WITH_GLIBC
@pytest.mark.parametrize(
    ("variables", "is_returned"),
    [({}, True), ({"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}, False)],
    ids=["ours", "a user's own threshold"],
)
def test_large_blocks_are_returned_when_freed(variables, is_returned):
    """Fourteen blocks of 8 MB leave with their arrays, unless a user's own threshold lets malloc keep them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    command = [sys.executable, "-c", _PINNED]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert (int(output) > 100e6) == is_returned


def test_another_malloc_is_left_alone(monkeypatch):
    """A library without the option is no error."""
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _path: object())
    device.map_large_blocks()


def test_profile_and_measurement_describe_this_machine():
    """Positive figures, the kind of the default device, and a form with its reason."""
    found = profile()
    assert found.memory_bytes > 2**28
    measured = measure(num_rounds=1)
    assert measured.profile == found
    assert measured.gflops > 0
    assert measured.matrix_vector_gbps > 0
    assert measured.representation == ("float32" if found.kind == "cpu" else "checkpoint")
    assert measured.reason


@pytest.mark.parametrize(
    ("kind", "gflops", "advised"), [("cpu", 5.0, True), ("cpu", 250.0, False), ("metal", 5.0, False)]
)
def test_advice_comes_only_when_a_cpu_is_slow(kind, gflops, advised):
    """The reference BLAS gives 5 GFLOP/s; whoever sees that should install another."""
    advice = device._advice(kind, gflops)
    assert (advice is not None) == advised
    assert advice is None or "mkl" in advice
