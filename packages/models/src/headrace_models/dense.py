"""Dense decoders of every family, built from its descriptor: one transformer, as `headrace_scheduling` runs it.

Fused at load: q, k and v are one matrix, gate and up are one. B rows, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define

from headrace_kvcache import KVCache, RotatingKVCache
from headrace_models.errors import UnsupportedArchitecture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from headrace_models.attention import Attention
    from headrace_models.config import ModelConfig
    from headrace_models.cpu_norm import ProductNorm
    from headrace_models.feed_forward import FeedForward, PlainFeedForward
    from headrace_models.layers import Embedding, LayerNorm, Linear, Norm
    from headrace_models.per_layer import PerLayerGate, PerLayerInputs
    from headrace_models.rope import Rope

__all__ = ["DenseLayer", "DenseModel", "Residual"]


@define(kw_only=True)
class Residual:
    """How a block hangs on the residual stream: norms before and after it, and the scale of what it adds."""

    entry: Norm | ProductNorm | LayerNorm | None
    exit: Norm | ProductNorm | LayerNorm | None
    scale: float | None

    def enter(self, x: mx.array) -> mx.array:
        """Return what the block reads."""
        return x if self.entry is None else self.entry(x)

    def add(self, x: mx.array, block: mx.array) -> mx.array:
        """Add what the block gave."""
        if self.exit is not None:
            block = self.exit(block)
        return x + block if self.scale is None else x + block * self.scale

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        for norm in (self.entry, self.exit):
            if norm is not None:
                yield from norm.arrays()


@define(kw_only=True)
class DenseLayer:
    """One transformer block."""

    attention: Attention
    around_attention: Residual
    feed_forward: FeedForward | PlainFeedForward
    around_feed_forward: Residual
    per_layer: PerLayerGate | None = None
    around_per_layer: Residual | None = None
    output_scale: mx.array | None = None
    """`(1,)`, factor of what leaves the layer."""

    def __call__(
        self,
        x: mx.array,
        cache: Any,
        rotations: Sequence[Callable[[mx.array], mx.array]],
        own_input: mx.array | None = None,
    ) -> mx.array:
        x = self.around_attention.add(x, self.attention(self.around_attention.enter(x), cache, rotations))
        x = self.around_feed_forward.add(x, self.feed_forward(self.around_feed_forward.enter(x)))
        if self.per_layer is not None and self.around_per_layer is not None and own_input is not None:
            x = self.around_per_layer.add(x, self.per_layer(x, own_input))
        return x if self.output_scale is None else x * self.output_scale

    def make_cache(self) -> KVCache | RotatingKVCache:
        """Make an empty single-row cache of the kind that the layer's attention needs."""
        window = self.attention.window
        return KVCache() if window is None else RotatingKVCache(max_size=window)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        for part in (self.attention, self.around_attention, self.feed_forward, self.around_feed_forward):
            yield from part.arrays()
        for part in (self.per_layer, self.around_per_layer):
            if part is not None:
                yield from part.arrays()
        if self.output_scale is not None:
            yield self.output_scale


@define(kw_only=True)
class DenseModel:
    """A dense decoder as the engine runs it; fits `headrace_scheduling`'s `RuntimeModel` by shape."""

    config: ModelConfig
    embedding: Embedding
    layers: list[DenseLayer]
    norm: Norm | ProductNorm | LayerNorm
    head: Linear | None
    """None when the embedding is the head."""
    ropes: Sequence[Rope]
    logit_divisor: float | None
    logit_softcap: float | None
    cache_indices: Sequence[int]
    """Per layer, which of the caches it attends to; layers that share keys and values have the same."""
    per_layer_inputs: PerLayerInputs | None = None
    weights_bytes: int = 0

    @property
    def num_caches(self) -> int:
        """The layers that make keys and values of their own."""
        return max(self.cache_indices) + 1

    def make_cache(self) -> list[KVCache | RotatingKVCache]:
        """Make one empty single-row cache per layer that makes keys and values; it costs no memory."""
        return [layer.make_cache() for layer in self.layers if layer.attention.num_kv_heads]

    def forward_hidden(self, ids: mx.array, caches: Sequence[Any], *, context: object | None = None) -> mx.array:
        """Append `ids (B, T) int32` to the caches and return the normed hidden states `(B, T, D)`, before the head.

        Args:
            caches: what `make_cache` returns, or one view for each of a batch; `offset` is read once, from the first.
        """
        return self.forward_embeddings(self.embedding(ids), caches, ids=ids, context=context)

    def forward_embeddings(
        self,
        embeddings: mx.array,
        caches: Sequence[Any],
        *,
        ids: mx.array | None = None,
        context: object | None = None,
    ) -> mx.array:
        """As `forward_hidden`, from embeddings `(B, T, D)` as `embedding` gives them, scaled if the family scales.

        Raises:
            ValueError: the number of caches is wrong, or `ids` is None and layers have inputs of their own, which are
                looked up by token.
        """
        del context  # plain text has neither media nor adapters
        if len(caches) != self.num_caches:
            raise ValueError(f"{len(caches)} caches are given; this model has {self.num_caches}: use make_cache().")
        hidden, offset = embeddings, caches[0].offset
        own_inputs = self._own_inputs(ids, embeddings)
        rotations = [rope.at(offset, hidden.shape[1], hidden.dtype) for rope in self.ropes]
        for layer, index, own_input in zip(self.layers, self.cache_indices, own_inputs, strict=True):
            hidden = layer(hidden, caches[index], rotations, own_input)
        return self.norm(hidden)

    def _own_inputs(self, ids: mx.array | None, embeddings: mx.array) -> Sequence[mx.array | None]:
        if self.per_layer_inputs is None:
            return [None] * len(self.layers)
        if ids is None:
            raise ValueError("ids is None; layers of this model look inputs up by token. Give ids beside embeddings.")
        return self.per_layer_inputs(ids, embeddings)

    def logits_from_hidden(self, hidden: mx.array) -> mx.array:
        """Project `(B, T, D)` to logits `(B, T, V)`."""
        logits = self.embedding.project(hidden) if self.head is None else self.head(hidden)
        if self.logit_divisor is not None:
            logits = logits / self.logit_divisor
        if self.logit_softcap is not None:
            logits = mx.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def row_context(self, *, adapters: Sequence[str] = (), media: object | None = None) -> None:
        """Return None, a plain text row.

        Raises:
            ValueError: (UnsupportedArchitecture) for adapters or media.
        """
        if adapters or media is not None:
            lacking = f"adapters {list(adapters)!r}" if adapters else "media"
            raise UnsupportedArchitecture(f"A {self.config.model_type!r} model takes no {lacking}; send text alone.")

    def batch_context(self, rows: Sequence[object | None]) -> None:
        """Return None: every row of these families is plain text."""
        del rows

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights; a tied head is counted once."""
        yield from self.embedding.arrays()
        for layer in self.layers:
            yield from layer.arrays()
        yield from self.norm.arrays()
        if self.per_layer_inputs is not None:
            yield from self.per_layer_inputs.arrays()
        if self.head is not None:
            yield from self.head.arrays()
