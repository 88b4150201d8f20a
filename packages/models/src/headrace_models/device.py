"""The machine a model runs on: the fast BLAS of a CPU, its malloc, what the device is, and how fast it measures.

`enable_fast_blas` changes symbols for the whole process, so only programs call it, and before anything imports mlx;
`map_large_blocks` changes the process's malloc.
This module imports mlx only inside the functions that measure.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mlx.core as mx

__all__ = [
    "BlasReport",
    "DeviceKind",
    "DeviceMeasurement",
    "DeviceProfile",
    "enable_fast_blas",
    "interleave_streams",
    "map_large_blocks",
    "measure",
    "profile",
    "share_blas",
]

DeviceKind = Literal["metal", "cuda", "cpu"]

_MKL_NAMES = ("libmkl_rt.so.3", "libmkl_rt.so.2")
_OPENBLAS_NAMES = ("libopenblas.so.0",)
# Functions that set and tell the number of threads.
_THREAD_FUNCTIONS = (
    ("MKL_Set_Num_Threads", "MKL_Get_Max_Threads"),
    ("openblas_set_num_threads", "openblas_get_num_threads"),
)
# The option's number in glibc's malloc.h.
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
_MAPPED_BLOCK_BYTES = 4 * 2**20
_SLOW_GFLOPS = 40.0
_MATRIX_SIZE = 1024
_VECTOR_SHAPE = (1024, 4096)


@frozen(kw_only=True)
class BlasReport:
    """What `enable_fast_blas` did."""

    loaded: bool
    name: str | None
    """`mkl` or `openblas`; None if none was loaded."""
    path: str | None
    reason: str
    """Why this one, or why none: one sentence."""


@frozen(kw_only=True)
class DeviceProfile:
    """The device that MLX uses by default."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    num_cpus: int


@frozen(kw_only=True)
class DeviceMeasurement:
    """How fast the device multiplies in float32, and what follows from it."""

    profile: DeviceProfile
    gflops: float
    """Of a square matrix product."""
    matrix_vector_gbps: float
    """Bytes of the matrix read per second in a matrix-vector product, in 1e9 bytes: it bounds decoding."""
    representation: str
    """The form that `dtype="auto"` gives weights on this device."""
    reason: str
    advice: str | None
    """What to install or change; None when the device is as fast as it should be."""


def enable_fast_blas(library_dirs: Sequence[Path] | None = None) -> BlasReport:
    """Load a fast BLAS into the process, whose products MLX's CPU library then uses.

    Looks for MKL in `library_dirs` first, then for MKL and OpenBLAS where the system's loader looks.

    Args:
        library_dirs: folders to look in; None is the `lib` folder of the running environment.
    """
    if sys.platform != "linux":
        return _not_loaded("MLX brings its own fast BLAS on this system.")
    if "mlx.core" in sys.modules:
        return _not_loaded("mlx is already imported, and its symbols are bound; call this before the first import.")
    folders = [Path(sys.prefix) / "lib"] if library_dirs is None else library_dirs
    candidates = [("mkl", str(folder / name)) for folder in folders for name in _MKL_NAMES if (folder / name).exists()]
    candidates += [("mkl", name) for name in _MKL_NAMES] + [("openblas", name) for name in _OPENBLAS_NAMES]
    for name, path in candidates:
        if _load_global(path):
            return BlasReport(loaded=True, name=name, path=path, reason=f"{name} was found and loaded before mlx.")
    return _not_loaded("Neither MKL nor OpenBLAS was found; install the Python package 'mkl' or Debian's libopenblas0.")


def _not_loaded(reason: str) -> BlasReport:
    return BlasReport(loaded=False, name=None, path=None, reason=reason)


def _load_global(path: str) -> bool:
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def interleave_streams() -> None:
    """Let MLX enqueue independent parts of a graph in turns, so that streams of a CPU work at the same time.

    Its default follows one part to its end before the next. Only before MLX evaluates for the first time has this an
    effect; a width that the environment sets is kept.
    """
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "50")


def map_large_blocks() -> None:
    """Let glibc's malloc return every block of at least 4 MiB to the system as soon as it is freed.

    By default each large block that is freed makes malloc keep blocks up to its size (32 MiB at most) in its heaps,
    where those that stay pin the room of those that go: MLX's buffers then take up to half again as much memory as
    MLX counts. Smaller blocks, those of a step of few rows, stay in the heaps, because new pages cost time. A threshold
    that the environment sets is kept; where malloc is another's, nothing happens.
    """
    if _MMAP_THRESHOLD_VARIABLE in os.environ:
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    set_option(_M_MMAP_THRESHOLD, _MAPPED_BLOCK_BYTES)


def share_blas(num_streams: int) -> None:
    """Divide the threads of the BLAS in this process among so many streams; 1 gives one stream all of them."""
    found = _blas_threads()
    if found is not None:
        set_threads, num_threads = found
        set_threads(max(1, num_threads // num_streams))


@cache
def _blas_threads() -> tuple[Callable[[int], object], int] | None:
    """Find what sets the number of threads, and their number before it was ever set; None for no known BLAS."""
    process = ctypes.CDLL(None)
    for set_name, get_name in _THREAD_FUNCTIONS:
        try:
            return process[set_name], int(process[get_name]())
        except AttributeError:
            continue
    return None


def profile() -> DeviceProfile:
    """Describe the device that MLX uses by default. Imports mlx."""
    import mlx.core as mx

    facts = mx.device_info(mx.default_device())
    kind = _kind(mx.default_device())
    name = str(facts.get("device_name") or facts.get("architecture") or kind)
    reported = facts.get("memory_size") or facts.get("total_memory")
    memory_bytes = int(reported) if isinstance(reported, int) and kind != "cpu" else _system_memory_bytes()
    return DeviceProfile(kind=kind, name=name, memory_bytes=memory_bytes, num_cpus=os.cpu_count() or 1)


def _kind(device: mx.Device) -> DeviceKind:
    import mlx.core as mx

    if device.type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _system_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure(*, num_rounds: int = 3) -> DeviceMeasurement:
    """Measure products in float32, for about a second on a fast device. Imports mlx.

    Args:
        num_rounds: the best of so many rounds counts, because neighbours only ever make one slower.
    """
    import mlx.core as mx

    found = profile()
    square = mx.random.normal((_MATRIX_SIZE, _MATRIX_SIZE))
    matrix, vector = mx.random.normal(_VECTOR_SHAPE), mx.random.normal((1, _VECTOR_SHAPE[0]))
    mx.eval(square, matrix, vector)
    product_s = _best_time_s(lambda: square @ square, num_rounds)
    vector_s = _best_time_s(lambda: vector @ matrix, num_rounds)
    gflops = 2 * _MATRIX_SIZE**3 / product_s / 1e9
    representation, reason = _representation(found.kind)
    return DeviceMeasurement(
        profile=found,
        gflops=gflops,
        matrix_vector_gbps=matrix.nbytes / vector_s / 1e9,
        representation=representation,
        reason=reason,
        advice=_advice(found.kind, gflops),
    )


def _best_time_s(product: Callable[[], mx.array], num_rounds: int) -> float:
    import mlx.core as mx

    mx.eval(product())
    times: list[float] = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        mx.eval(product())
        times.append(time.perf_counter() - start)
    return min(times)


def _representation(kind: DeviceKind) -> tuple[str, str]:
    if kind == "cpu":
        return "float32", "On a CPU only float32 products go through the BLAS; 16-bit and packed ones are far slower."
    return "checkpoint", f"On {kind} the checkpoint's own dtype and quantization are the fastest form."


def _advice(kind: DeviceKind, gflops: float) -> str | None:
    if kind != "cpu" or gflops >= _SLOW_GFLOPS:
        return None
    return (
        f"{gflops:.0f} GFLOP/s is what MLX's reference BLAS gives. Install the Python package 'mkl' (x86-64) or "
        "Debian's libopenblas0-pthread, and start through a Headrace program, which loads it before mlx."
    )
