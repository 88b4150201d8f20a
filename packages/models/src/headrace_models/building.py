"""From a checkpoint to a dense model: tensors are taken layer by layer, so that each source is freed soon."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_models.activations import activation_of
from headrace_models.assembly import Assembly
from headrace_models.attention import Attention, EachHeadNorm, WholeNorm
from headrace_models.cpu_layout import fuse_for_cpu, head_for_cpu
from headrace_models.cpu_norm import norm_for_cpu
from headrace_models.dense import DenseLayer, DenseModel, Residual
from headrace_models.feed_forward import FeedForward, PlainFeedForward
from headrace_models.layers import Embedding, LayerNorm, Linear, Norm, fuse
from headrace_models.per_layer import PerLayerGate, PerLayerInputs
from headrace_models.plan import make_plan
from headrace_models.rope import AngleRope, FusedRope
from headrace_models.rope_scaling import rope_angles
from headrace_models.tensors import check_num_layers, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from headrace_models.config import ModelConfig
    from headrace_models.cpu_norm import ProductNorm
    from headrace_models.layer_shapes import LayerShape
    from headrace_models.layers import Projection
    from headrace_models.plan import Plan, RopePlan
    from headrace_models.rope import Rope
    from headrace_models.weights import Checkpoint

__all__ = ["build_dense"]


def build_dense(config: ModelConfig, checkpoint: Checkpoint, *, on_gpu: bool) -> DenseModel:
    """Build the model of a checkpoint; takes all tensors out of it.

    Args:
        on_gpu: use MLX's rope kernel and matrices as they are, rather than the forms and layouts that suit a CPU.

    Raises:
        WeightMismatch: listing missing, unexpected and misshapen tensors.
        UnsupportedArchitecture: for a model type or a setting that no family computes.
    """
    check_num_layers(config, checkpoint.tensors)
    plan = make_plan(config)
    factors = checkpoint.take_rope_factors()
    checkpoint.check(tensor_shapes(config))
    assembly = Assembly(on_gpu)
    builder = _Builder(config=config, plan=plan, checkpoint=checkpoint, assembly=assembly, on_gpu=on_gpu)
    # The largest first: what converting them needs on top is needed before the layers are there.
    table = checkpoint.take_matrix("model.embed_tokens")
    embedding = Embedding(table if on_gpu else head_for_cpu(table), plan.embedding_scale)
    assembly.start(list(embedding.arrays()))
    head = None if config.tie_word_embeddings else checkpoint.take_linear("lm_head")
    if head is not None:
        head = head if on_gpu else Linear(head_for_cpu(head.weight), head.bias)
        assembly.start(list(head.arrays()))
    model = DenseModel(
        config=config,
        ropes=[builder.rope(rope, factors if index == 0 else None) for index, rope in enumerate(plan.ropes)],
        layers=[builder.started_layer(index) for index in range(config.num_hidden_layers)],
        embedding=embedding,
        norm=builder.norm("model.norm"),
        head=head,
        logit_divisor=plan.logit_divisor,
        logit_softcap=plan.logit_softcap,
        cache_indices=_cache_indices([shape.source for shape in plan.shapes]),
        per_layer_inputs=builder.per_layer_inputs(),
    )
    assembly.start(list(model.arrays()))
    assembly.finish()
    model.weights_bytes = sum(array.nbytes for array in model.arrays())
    return model


def _cache_indices(sources: Sequence[int | None]) -> list[int]:
    """Number the caches in the order of the layers that own them."""
    owners = [index for index, source in enumerate(sources) if source is None]
    return [owners.index(index if source is None else source) for index, source in enumerate(sources)]


@frozen(kw_only=True)
class _Builder:
    """The parts of one model."""

    config: ModelConfig
    plan: Plan
    checkpoint: Checkpoint
    assembly: Assembly
    on_gpu: bool

    def rope(self, rope: RopePlan, factors: Sequence[float] | None) -> Rope:
        angles = rope_angles(
            rope.size, rope.base, rope.scaling, max_positions=self.config.max_positions, factors=factors
        )
        form = FusedRope if self.on_gpu else AngleRope
        return form.from_angles(angles, is_traditional=rope.is_traditional)

    def started_layer(self, index: int) -> DenseLayer:
        with self.assembly.stream(index):
            layer = self.layer(index)
        self.assembly.start(list(layer.arrays()))
        return layer

    def layer(self, index: int) -> DenseLayer:
        prefix, norms = f"model.layers.{index}.", self.plan.family.norms
        layer = DenseLayer(
            attention=self._attention(f"{prefix}self_attn.", index),
            around_attention=self._residual(prefix, norms.before_attention, norms.after_attention),
            feed_forward=self._feed_forward(f"{prefix}mlp."),
            around_feed_forward=self._residual(prefix, norms.before_feed_forward, norms.after_feed_forward),
        )
        if self.plan.per_layer is not None:
            layer.per_layer = self._per_layer_gate(prefix)
            layer.around_per_layer = self._residual(prefix, None, "post_per_layer_input_norm")
        if self.plan.family.has_layer_scale:
            layer.output_scale = self.checkpoint.take_vector(f"{prefix}layer_scalar")
        return layer

    def norm(self, path: str) -> Norm | ProductNorm | LayerNorm:
        gain, epsilon = self._gain(path), self.config.rms_norm_eps
        if self.plan.family.norm == "layer":
            return LayerNorm(gain, self.checkpoint.take_vector(f"{path}.bias"), epsilon)
        return Norm(gain, epsilon) if self.on_gpu else norm_for_cpu(gain, epsilon)

    def _residual(self, prefix: str, entry: str | None, exit_: str | None) -> Residual:
        return Residual(
            entry=None if entry is None else self.norm(prefix + entry),
            exit=None if exit_ is None else self.norm(prefix + exit_),
            scale=self.plan.residual_scale,
        )

    def per_layer_inputs(self) -> PerLayerInputs | None:
        if self.plan.per_layer is None:
            return None
        return PerLayerInputs(
            embedding=Embedding(
                self.checkpoint.take_matrix("model.embed_tokens_per_layer"), sqrt(self.plan.per_layer.size)
            ),
            projection=self.checkpoint.take_linear("model.per_layer_model_projection"),
            norm=Norm(self._gain("model.per_layer_projection_norm"), self.config.rms_norm_eps),
            num_layers=self.config.num_hidden_layers,
            projection_scale=self.config.hidden_size**-0.5,
        )

    def _per_layer_gate(self, prefix: str) -> PerLayerGate:
        gate, projection = (
            self.checkpoint.take_linear(prefix + name) for name in ("per_layer_input_gate", "per_layer_projection")
        )
        return PerLayerGate(gate, projection, activation_of(self.plan.activation))

    def _attention(self, prefix: str, index: int) -> Attention:
        config, plan, shape = self.config, self.plan, self.plan.shapes[index]
        return Attention(
            qkv=self._qkv(prefix, shape),
            out=self.checkpoint.take_linear(f"{prefix}o_proj"),
            num_heads=config.num_attention_heads,
            num_kv_heads=shape.num_kv_heads if shape.source is None else 0,
            scale=plan.attention_scale,
            window=plan.windows[index],
            softcap=plan.attention_softcap,
            rope_index=plan.rope_indices[index],
            each_head_norm=self._each_head_norm(prefix, shape) if plan.family.head_norm == "each" else None,
            whole_norm=self._whole_norm(prefix) if plan.family.head_norm == "all" else None,
            has_values=shape.has_values,
            value_norm_epsilon=config.rms_norm_eps if plan.family.has_value_norm else None,
        )

    def _qkv(self, prefix: str, shape: LayerShape) -> Projection:
        if self.plan.family.stacks_qkv:
            parts = [self.checkpoint.take_linear(f"{prefix}qkv_proj")]
        else:
            names = "q" if shape.source is not None else "qkv" if shape.has_values else "qk"
            parts = [self.checkpoint.take_linear(f"{prefix}{name}_proj") for name in names]
        return fuse(parts) if self.on_gpu else fuse_for_cpu(parts)

    def _each_head_norm(self, prefix: str, shape: LayerShape) -> EachHeadNorm:
        return EachHeadNorm.from_parts(
            self._gain(f"{prefix}q_norm"),
            self._gain(f"{prefix}k_norm") if shape.source is None else None,
            num_heads=self.config.num_attention_heads,
            num_kv_heads=shape.num_kv_heads,
            epsilon=self.config.rms_norm_eps,
        )

    def _gain(self, path: str) -> mx.array:
        plus = 1.0 if self.plan.family.norm == "rms_plus_one" else None
        return self.checkpoint.take_vector(f"{path}.weight", plus=plus)

    def _whole_norm(self, prefix: str) -> WholeNorm:
        queries, keys = (self.checkpoint.take_vector(f"{prefix}{name}_norm.weight") for name in "qk")
        return WholeNorm(Norm(queries, self.config.rms_norm_eps), Norm(keys, self.config.rms_norm_eps))

    def _feed_forward(self, prefix: str) -> FeedForward | PlainFeedForward:
        def linear(name: str) -> Linear:
            return self.checkpoint.take_linear(prefix + name)

        activation, on_gpu = self.plan.activation, self.on_gpu
        match self.plan.family.feed_forward:
            case "gated":
                return FeedForward.from_parts(
                    linear("gate_proj"), linear("up_proj"), linear("down_proj"), activation=activation, on_gpu=on_gpu
                )
            case "stacked":
                return FeedForward.from_stacked(
                    linear("gate_up_proj"), linear("down_proj"), activation=activation, on_gpu=on_gpu
                )
            case "plain":
                return PlainFeedForward(linear("c_fc"), linear("c_proj"), activation_of(activation))
