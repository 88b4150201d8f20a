"""Assembly: arrays are what they would be one by one, and only so many bytes are under way."""

import threading

import mlx.core as mx
import pytest

from headrace_models.assembly import Assembly


@pytest.mark.parametrize("on_gpu", [False, True])
def test_groups_of_both_streams_hold_what_was_asked_for(on_gpu):
    """Arrays made beside each other depend on arrays made before, and any thread may read them in the end."""
    assembly, base, kept = Assembly(on_gpu), mx.arange(1000), []
    for index in range(9):
        with assembly.stream(index):
            group = [base * index, mx.concatenate([base, base[::-1] + index])]
        assembly.start(group)
        kept.append(group)
    assembly.finish()
    read: list[list[int]] = []
    thread = threading.Thread(target=lambda: read.extend([one.tolist() for one in group] for group in kept))
    thread.start()
    thread.join()
    for index, (scaled, joined) in enumerate(read):
        assert scaled == [number * index for number in range(1000)]
        assert joined == [*range(1000), *(999 - number + index for number in range(1000))]


def test_bytes_under_way_are_bounded(monkeypatch):
    """Earlier groups are waited for, oldest first, once more than the bound is under way; the last never is."""
    monkeypatch.setattr("headrace_models.assembly._MOST_AHEAD_BYTES", 10_000)
    waited: list[mx.array] = []
    monkeypatch.setattr("headrace_models.assembly.mx.eval", waited.extend)
    assembly = Assembly(on_gpu=False)
    groups = [[mx.zeros(size, mx.uint8)] for size in (4_000, 4_000, 4_000, 50_000, 1)]
    expected = [0, 0, 1, 3, 4]
    for group, num_waited in zip(groups, expected, strict=True):
        assembly.start(group)
        assert [id(array) for array in waited] == [id(group[0]) for group in groups[:num_waited]]
    assembly.finish()
    assert len(waited) == len(groups)


def test_threads_have_streams_of_their_own():
    """A stream belongs to one thread; loading in another one gets another stream, and the same again later."""

    def inside() -> mx.Stream:
        with Assembly(on_gpu=False).stream(1):
            return mx.default_stream(mx.cpu)

    found: list[mx.Stream] = []
    thread = threading.Thread(target=lambda: found.extend([inside(), inside()]))
    thread.start()
    thread.join()
    assert found[0] == found[1]
    assert found[0] not in (inside(), mx.default_stream(mx.cpu))
