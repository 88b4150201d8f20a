"""Small runtime models on real caches, for tests and benchmarks. Needs mlx."""

# ruff: noqa: ARG002 - signatures are those of the RuntimeModel protocol

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen

from headrace_kvcache import KVCache, attend
from headrace_scheduling.testing.loading import FakeFacts, FakeLoadedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace_scheduling.ports import RowContext, RuntimeModel


class _TextOnlyModel:
    """What the models here share: no media, no adapters."""

    weights_bytes = 0

    def __init__(self, facts: FakeFacts) -> None:
        self.config = facts

    def forward_embeddings(
        self, embeddings: mx.array, caches: Sequence[Any], *, ids: mx.array | None = None, context: object | None = None
    ) -> mx.array:
        raise ValueError("this model takes token ids only")

    def row_context(self, *, adapters: Sequence[str] = (), media: object | None = None) -> RowContext | None:
        if adapters or media is not None:
            raise ValueError("this model has neither adapters nor media")
        return None

    def batch_context(self, rows: Sequence[RowContext | None]) -> object | None:
        return None


class NullModel(_TextOnlyModel):
    """Computes nothing: its forward returns one cached array, so that what remains is the engine's own work.

    Args:
        vocab_size: width of the cached logits.
        step_s: seconds that a forward sleeps, as if a device computed.
    """

    def __init__(self, facts: FakeFacts | None = None, *, vocab_size: int | None = None, step_s: float = 0.0) -> None:
        super().__init__(FakeFacts() if facts is None else facts)
        self._step_s = step_s
        self._vocab_size = self.config.vocab_size if vocab_size is None else vocab_size
        self._hidden: dict[tuple[int, int], mx.array] = {}
        self._logits: dict[int, mx.array] = {}

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def forward_hidden(self, ids: mx.array, caches: Sequence[Any], *, context: object | None = None) -> mx.array:
        shape = (ids.shape[0], ids.shape[1])
        if self._step_s:
            time.sleep(self._step_s)
        if shape not in self._hidden:
            self._hidden[shape] = mx.zeros((*shape, 1))
            mx.eval(self._hidden[shape])
        return self._hidden[shape]

    def logits_from_hidden(self, hidden: mx.array) -> mx.array:
        num_rows = hidden.shape[0]
        if num_rows not in self._logits:
            ramp = mx.arange(self._vocab_size, dtype=mx.float32) % 97
            self._logits[num_rows] = mx.broadcast_to(ramp, (num_rows, 1, self._vocab_size)) + mx.zeros((num_rows, 1, 1))
            mx.eval(self._logits[num_rows])
        return self._logits[num_rows]


class ScriptedModel(_TextOnlyModel):
    """A random two-layer attention model: its next token depends on every position in its caches.

    Equal seeds give equal weights in every process.
    """

    _NUM_HEADS = 2
    _HEAD_SIZE = 8

    def __init__(self, facts: FakeFacts | None = None, *, seed: int = 0, num_layers: int = 2) -> None:
        super().__init__(FakeFacts() if facts is None else facts)
        size = self._NUM_HEADS * self._HEAD_SIZE
        keys = mx.random.split(mx.random.key(seed), 4 * num_layers + 3)
        self._embedding = mx.random.normal((self.config.vocab_size, size), key=keys[0])
        self._positions = mx.random.normal((self.config.max_positions, size), key=keys[1])
        self._head = mx.random.normal((size, self.config.vocab_size), key=keys[2])
        self._layers = [
            tuple(mx.random.normal((size, size), key=keys[3 + 4 * index + part]) * size**-0.5 for part in range(4))
            for index in range(num_layers)
        ]
        mx.eval(self._embedding, self._positions, self._head, self._layers)

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self._layers]

    def forward_hidden(self, ids: mx.array, caches: Sequence[Any], *, context: object | None = None) -> mx.array:
        num_tokens = ids.shape[1]
        positions = mx.reshape(mx.array(caches[0].offset), (-1, 1)) + mx.arange(num_tokens)
        hidden = self._embedding[ids] + self._positions[positions]
        for (query, key, value, output), cache in zip(self._layers, caches, strict=True):
            heads = [self._split(hidden @ weight) for weight in (query, key, value)]
            attended = attend(cache, heads[0], heads[1], heads[2], scale=self._HEAD_SIZE**-0.5)
            hidden = hidden + mx.flatten(mx.transpose(attended, (0, 2, 1, 3)), 2) @ output
        return hidden

    def logits_from_hidden(self, hidden: mx.array) -> mx.array:
        return hidden @ self._head

    def _split(self, projected: mx.array) -> mx.array:
        return mx.transpose(mx.unflatten(projected, 2, (self._NUM_HEADS, self._HEAD_SIZE)), (0, 2, 1, 3))


class FailingModel(ScriptedModel):
    """A `ScriptedModel` whose forwards raise at given numbers, counted from 0.

    Attributes:
        on_failure: called with the caches of the failing forward, before it raises.
    """

    def __init__(
        self,
        facts: FakeFacts | None = None,
        *,
        failing_forwards: frozenset[int],
        on_failure: Callable[[Sequence[Any]], None] | None = None,
    ) -> None:
        super().__init__(facts)
        self._failing_forwards = failing_forwards
        self._num_forwards = 0
        self.on_failure = on_failure

    def forward_hidden(self, ids: mx.array, caches: Sequence[Any], *, context: object | None = None) -> mx.array:
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1
        if number in self._failing_forwards:
            if self.on_failure is not None:
                self.on_failure(caches)
            raise ArithmeticError(f"forward {number} fails as told")
        return super().forward_hidden(ids, caches, context=context)


@frozen
class ModelLoaderFake:
    """A picklable loader of a model of this module.

    Attributes:
        make_model: builds the model on the engine's thread, such as the class `ScriptedModel` or a partial of it.
    """

    make_model: Callable[[], RuntimeModel]

    def __call__(self) -> FakeLoadedModel:
        return FakeLoadedModel(model=self.make_model())
