"""The llama family: grouped-query attention, half-split rope, RMS norm, SwiGLU; optional biases and tied head.

Fused at load: q, k and v are one matrix, gate and up are one. B rows, T positions, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from attrs import define

from headrace_kvcache import KVCache, attend
from headrace_models.errors import UnsupportedArchitecture
from headrace_models.layers import Embedding, FeedForward, Linear, Norm, fuse
from headrace_models.rope import AngleRope, FusedRope, rope_frequencies

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    import mlx.core as mx

    from headrace_models.config import ModelConfig
    from headrace_models.layers import Projection
    from headrace_models.rope import Rope
    from headrace_models.weights import Checkpoint

__all__ = ["Llama", "build_llama", "llama_shapes"]


@define
class LlamaLayer:
    """One transformer block."""

    attention_norm: Norm
    qkv: Projection
    out: Projection
    feed_forward_norm: Norm
    feed_forward: FeedForward
    num_heads: int
    num_kv_heads: int
    scale: float

    def __call__(self, x: mx.array, cache: Any, rotate: Callable[[mx.array], mx.array]) -> mx.array:
        x = x + self._attend(self.attention_norm(x), cache, rotate)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def _attend(self, x: mx.array, cache: Any, rotate: Callable[[mx.array], mx.array]) -> mx.array:
        rows, num_tokens, _ = x.shape
        num_rotated = self.num_heads + self.num_kv_heads
        heads = self._split_heads(self.qkv(x), num_rotated + self.num_kv_heads)
        rotated = rotate(heads[:, :num_rotated])
        attended = attend(
            cache,
            rotated[:, : self.num_heads],
            rotated[:, self.num_heads :],
            heads[:, num_rotated:],
            scale=self.scale,
        )
        if num_tokens > 1:
            attended = attended.transpose(0, 2, 1, 3)
        return self.out(attended.reshape(rows, num_tokens, -1))

    @staticmethod
    def _split_heads(fused: mx.array, num_heads: int) -> mx.array:
        """`(B, T, H * D)` to `(B, H, T, D)`; for one token no transpose, which would cost a primitive per layer."""
        rows, num_tokens, _ = fused.shape
        if num_tokens == 1:
            return fused.reshape(rows, num_heads, 1, -1)
        return fused.reshape(rows, num_tokens, num_heads, -1).transpose(0, 2, 1, 3)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        for part in (self.attention_norm, self.qkv, self.out, self.feed_forward_norm, self.feed_forward):
            yield from part.arrays()


@define
class Llama:
    """A llama model as the engine runs it; fits `headrace_scheduling`'s `RuntimeModel` by shape."""

    config: ModelConfig
    embedding: Embedding
    layers: list[LlamaLayer]
    norm: Norm
    head: Linear | None
    """None when the embedding is the head."""
    rope: Rope
    weights_bytes: int

    def make_cache(self) -> list[KVCache]:
        """Make one empty single-row cache per layer; it costs no memory."""
        return [KVCache() for _ in self.layers]

    def forward_hidden(self, ids: mx.array, caches: Sequence[Any], *, context: object | None = None) -> mx.array:
        """Append `ids (B, T) int32` to the caches and return the normed hidden states `(B, T, D)`, before the head.

        Args:
            caches: what `make_cache` returns, or one view per layer of a batch; `offset` is read once, from the first.
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
        """As `forward_hidden`, from embeddings `(B, T, D)`."""
        del ids, context  # plain text has neither media nor adapters
        hidden = embeddings
        rotate = self.rope.at(caches[0].offset, hidden.shape[1], hidden.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, cache, rotate)
        return self.norm(hidden)

    def logits_from_hidden(self, hidden: mx.array) -> mx.array:
        """Project `(B, T, D)` to logits `(B, T, V)`."""
        return self.embedding.project(hidden) if self.head is None else self.head(hidden)

    def row_context(self, *, adapters: Sequence[str] = (), media: object | None = None) -> None:
        """Return None, a plain text row.

        Raises:
            ValueError: (UnsupportedArchitecture) for adapters or media.
        """
        if adapters or media is not None:
            lacking = f"adapters {list(adapters)!r}" if adapters else "media"
            raise UnsupportedArchitecture(f"A {self.config.model_type!r} model takes no {lacking}; send text alone.")

    def batch_context(self, rows: Sequence[object | None]) -> None:
        """Return None: every row of this family is plain text."""
        del rows

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights; a tied head is counted once."""
        yield from self.embedding.arrays()
        for layer in self.layers:
            yield from layer.arrays()
        yield from self.norm.arrays()
        if self.head is not None:
            yield from self.head.arrays()


def llama_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a checkpoint of this configuration must have, by Hugging Face name, unpacked shapes."""
    hidden, middle = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    matrices = {
        "self_attn.q_proj": (q_rows, hidden, config.attention_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.attention_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q_rows, config.attention_bias),
        "mlp.gate_proj": (middle, hidden, config.mlp_bias),
        "mlp.up_proj": (middle, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, middle, config.mlp_bias),
    }
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def build_llama(config: ModelConfig, checkpoint: Checkpoint, *, on_gpu: bool) -> Llama:
    """Build the model; takes its tensors out of `checkpoint` layer by layer, so that each source is freed at once.

    Args:
        on_gpu: use MLX's rope kernel and one product for gate and up, rather than the forms that suit a CPU.

    Raises:
        WeightMismatch: listing missing, unexpected and misshapen tensors.
        UnsupportedArchitecture: for settings that are not known, such as other rope scaling or activations.
    """
    _refuse_unknown(config)
    factors = checkpoint.take_rope_factors()
    frequencies = rope_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, max_positions=config.max_positions, factors=factors
    )
    checkpoint.check(llama_shapes(config))
    layers = [_build_layer(config, checkpoint, index, on_gpu=on_gpu) for index in range(config.num_hidden_layers)]
    model = Llama(
        config=config,
        embedding=Embedding(checkpoint.take_matrix("model.embed_tokens")),
        layers=layers,
        norm=Norm(checkpoint.take_vector("model.norm.weight"), config.rms_norm_eps),
        head=None if config.tie_word_embeddings else checkpoint.take_linear("lm_head"),
        rope=(FusedRope if on_gpu else AngleRope).from_frequencies(frequencies),
        weights_bytes=0,
    )
    checkpoint.settle(model.arrays())
    model.weights_bytes = sum(array.nbytes for array in model.arrays())
    return model


def _refuse_unknown(config: ModelConfig) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedArchitecture(
            f"hidden_act is {config.hidden_act!r}; the llama family runs 'silu'. Use a checkpoint with this activation."
        )
    if config.head_dim % 2:
        raise UnsupportedArchitecture(f"head_dim is {config.head_dim!r}; rope needs an even number.")
    layer_types = config.raw.get("layer_types")
    if isinstance(layer_types, Collection) and "sliding_attention" in layer_types:
        raise UnsupportedArchitecture(
            "layer_types has 'sliding_attention'; the llama family attends fully in all layers. "
            "Use a checkpoint without sliding windows."
        )


def _build_layer(config: ModelConfig, checkpoint: Checkpoint, index: int, *, on_gpu: bool) -> LlamaLayer:
    prefix = f"model.layers.{index}."

    def linear(name: str) -> Linear:
        return checkpoint.take_linear(prefix + name)

    def norm(name: str) -> Norm:
        return Norm(checkpoint.take_vector(f"{prefix}{name}.weight"), config.rms_norm_eps)

    layer = LlamaLayer(
        attention_norm=norm("input_layernorm"),
        qkv=fuse([linear(f"self_attn.{name}_proj") for name in "qkv"]),
        out=linear("self_attn.o_proj"),
        feed_forward_norm=norm("post_attention_layernorm"),
        feed_forward=FeedForward.from_parts(
            linear("mlp.gate_proj"), linear("mlp.up_proj"), linear("mlp.down_proj"), on_gpu=on_gpu
        ),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        scale=config.head_dim**-0.5,
    )
    checkpoint.settle(layer.arrays())
    return layer
