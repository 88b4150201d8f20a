"""Memory that was freed goes back to the system, also what lies between blocks that stay."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest

from headrace_scheduling import free_memory

# 40 KiB blocks of malloc, of which every fiftieth stays: malloc itself cannot lower a heap below one that does.
_SCATTERED = """
import mlx.core as mx
from headrace_scheduling import free_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def take():
    blocks = [mx.full((10_000,), float(index)) for index in range(4_000)]
    mx.eval(blocks)
    return blocks, resident()

blocks, full = take()
kept = blocks[::50]
del blocks
freed = full - resident()
free_memory.give_back()
given_back = full - resident()
print(freed, given_back, [block[0].item() for block in kept[:3]], sep=";")
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told to trim its heaps")
def test_what_lies_between_blocks_that_stay_is_given_back():
    """Of 160 MB nearly all is resident after it was freed, and nearly nothing after that; what stays is unharmed."""
    output = subprocess.run([sys.executable, "-c", _SCATTERED], check=True, capture_output=True, text=True).stdout
    freed, given_back, kept = output.strip().split(";")
    assert int(freed) < 40e6
    assert int(given_back) > 120e6
    assert kept == "[0.0, 50.0, 100.0]"


def test_without_such_a_malloc_the_buffers_of_mlx_alone_are_dropped(monkeypatch):
    """Another C library is no error, and MLX's own cache is emptied all the same."""
    monkeypatch.setattr(free_memory, "ctypes", SimpleNamespace(CDLL=lambda _path: object()))
    free_memory._malloc_trim.cache_clear()
    try:
        mx.eval(mx.zeros(1_000_000) + 1)
        free_memory.give_back()
        assert mx.get_cache_memory() == 0
        assert free_memory._malloc_trim() is None
    finally:
        free_memory._malloc_trim.cache_clear()


def test_on_a_gpu_heaps_are_left_alone(monkeypatch):
    """Its buffers are not malloc's, so that walking the heaps would cost time for nothing."""
    monkeypatch.setattr(free_memory.mx, "default_device", lambda: mx.Device(mx.gpu))
    free_memory._malloc_trim.cache_clear()
    try:
        assert free_memory._malloc_trim() is None
    finally:
        free_memory._malloc_trim.cache_clear()
