"""What one prefill chunk or decode step needs beside weights and caches, by formula.

The counts of activations were measured on the CPU backend, where MLX enqueues some ten operations ahead and frees none
of their inputs until they have run: small random models with one size changed at a time, docs/benchmarks.md has the
command and what the sums miss. On a GPU the fused kernels need no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from headrace_kvcache import CacheSpec, KVScheme, LayerSpec
    from headrace_models.config import ModelConfig
    from headrace_models.device import DeviceKind

__all__ = ["Transient"]

_FLOAT_BYTES = 4
# Activations alive at once, per token: hidden (one more with norms after the blocks), feed-forward, queries, keys.
_HIDDEN, _HIDDEN_WITH_EXITS, _HIDDEN_PACKED = 7, 8, 2
_MIDDLE, _QUERIES, _KEYS = 3, 6, 4
_COSINES = 2
# 16-bit activations are widened here and there.
_WIDENED = 1.5
_QUERY_TILE = 64
# Packed keys: scores and weights of a tile, those of the next, and tiles of keys and values unpacked.
_TILE, _SMALLEST_TILE, _TILE_SCORES, _TILE_BUFFERS, _UNPACKED = 512, 256, 1 << 22, 6, 8
_RING_SCORES, _RING_COPIES, _RING_SLACK = 1.4, 2, 16
_MASKED_SCORES = 1.15
# Head sizes of MLX's fused attention on GPUs, which holds no scores.
_FUSED_HEADS = frozenset({64, 80, 128})


@frozen(kw_only=True)
class Transient:
    """Bytes that a step takes and gives back.

    Attributes:
        config: the model.
        spec: its caches, one entry per layer that owns one.
        scheme: how they are stored.
        device: what computes.
        item_size: bytes of an activation.
        has_exit_norms: whether norms follow the blocks.
    """

    config: ModelConfig
    spec: CacheSpec
    scheme: KVScheme
    device: DeviceKind
    item_size: int
    has_exit_norms: bool

    def bytes_at(self, num_tokens: int, *, chunk: int, rows: int) -> int:
        """Return the most that a step needs: the last prefill chunk of a row of `num_tokens`, or a decode step.

        Args:
            num_tokens: positions that each row reaches.
            chunk: most prompt tokens of a step, all rows together.
            rows: rows that decode.
        """
        chunk = min(chunk, num_tokens)
        kinds = {(layer, self.scheme.packing_of(index, layer.kind) is not None) for index, layer in self._layers()}
        prefill = max(self._layer_bytes(layer, is_packed, num_tokens, chunk, rows) for layer, is_packed in kinds)
        decode = 2 * rows * self.config.num_attention_heads * num_tokens * self.item_size
        return round(max(prefill, decode) + self._waiting_bytes(chunk)) + self._logits_bytes(rows)

    def _layers(self) -> list[tuple[int, LayerSpec]]:
        return list(enumerate(self.spec.layers))

    def _layer_bytes(self, layer: LayerSpec, is_packed: bool, num_tokens: int, chunk: int, rows: int) -> float:
        plain = self._plain_bytes(layer, num_tokens, chunk, rows)
        # A row is stored plain until its first chunk is converted, so it goes through both.
        return max(plain, self._packed_bytes(layer, num_tokens, chunk)) if is_packed else plain

    def _plain_bytes(self, layer: LayerSpec, num_tokens: int, chunk: int, rows: int) -> float:
        config = self.config
        hidden = config.hidden_size * (_HIDDEN_WITH_EXITS if self.has_exit_norms else _HIDDEN)
        elements = hidden + config.intermediate_size * _MIDDLE
        if layer.kind != "sliding":
            scores = self._causal_scores(num_tokens, chunk, rows) * self._score_bytes(layer)
            return chunk * (elements + self._head_elements(layer)) * self._activation_bytes + scores
        columns = min(num_tokens, layer.window + _RING_SLACK + chunk)
        scores = _RING_SCORES * config.num_attention_heads * chunk * columns * self._score_bytes(layer)
        copies = _RING_COPIES * columns * layer.elements_per_token * self.item_size
        return chunk * elements * self._activation_bytes + scores + copies

    def _packed_bytes(self, layer: LayerSpec, num_tokens: int, chunk: int) -> float:
        heads, columns = self.config.num_attention_heads, num_tokens
        if layer.kind == "sliding":
            columns = min(num_tokens, layer.window + _RING_SLACK + chunk)
        tile = max(_SMALLEST_TILE, min(_TILE, _TILE_SCORES // (heads * chunk) // _SMALLEST_TILE * _SMALLEST_TILE))
        tile = min(tile, columns)
        unpacked = _UNPACKED * tile * layer.elements_per_token // 2
        elements = _HIDDEN_PACKED * self.config.hidden_size + self._head_elements(layer)
        return chunk * elements * self._activation_bytes + _FLOAT_BYTES * (
            _TILE_BUFFERS * heads * chunk * tile + unpacked
        )

    def _head_elements(self, layer: LayerSpec) -> int:
        size = layer.key_head_dim
        return size * (self.config.num_attention_heads * _QUERIES + layer.num_kv_heads * _KEYS + _COSINES)

    @property
    def _activation_bytes(self) -> float:
        return self.item_size if self.item_size == _FLOAT_BYTES else self.item_size * _WIDENED

    def _waiting_bytes(self, chunk: int) -> int:
        """Return what rings keep until the next step: a long chunk is written when that step reads the ring."""
        elements = sum(
            2 * (self.config.num_attention_heads + layer.num_kv_heads) * layer.key_head_dim
            + layer.num_kv_heads * layer.value_head_dim
            for layer in self.spec.layers
            if layer.kind == "sliding"
        )
        return elements * chunk * self.item_size if chunk > _RING_SLACK else 0

    def _causal_scores(self, num_tokens: int, chunk: int, rows: int) -> float:
        """Return how many scores of full attention are alive: all tiles of a layer are enqueued together."""
        heads = self.config.num_attention_heads
        if rows > 1 or self.item_size != _FLOAT_BYTES or self.device != "cpu":
            # Rows at different positions share a chunk under one mask over all columns.
            return (_MASKED_SCORES if self.device == "cpu" else 1) * heads * chunk * num_tokens
        first = num_tokens - chunk
        return sum(
            heads * min(_QUERY_TILE, chunk - low) * (first + min(low + _QUERY_TILE, chunk))
            for low in range(0, chunk, _QUERY_TILE)
        )

    def _score_bytes(self, layer: LayerSpec) -> float:
        if self.device != "cpu" and layer.key_head_dim in _FUSED_HEADS:
            return 0
        mask = 0 if self.item_size == _FLOAT_BYTES else 1 / self.config.num_attention_heads
        return self.item_size + mask

    def _logits_bytes(self, rows: int) -> int:
        """Logits, and what a sampler makes of them in float32."""
        return rows * self.config.vocab_size * (self.item_size + _FLOAT_BYTES)
