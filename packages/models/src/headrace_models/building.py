"""From a checkpoint to a dense model: tensors are taken layer by layer, so that each source is freed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from headrace_models.activations import activation_of
from headrace_models.attention import Attention, EachHeadNorm, WholeNorm
from headrace_models.dense import DenseLayer, DenseModel, Residual
from headrace_models.feed_forward import FeedForward, PlainFeedForward
from headrace_models.layers import Embedding, LayerNorm, Linear, Norm, fuse
from headrace_models.plan import make_plan
from headrace_models.rope import AngleRope, FusedRope
from headrace_models.rope_scaling import rope_angles
from headrace_models.tensors import check_num_layers, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_models.config import ModelConfig
    from headrace_models.layers import Projection
    from headrace_models.plan import Plan, RopePlan
    from headrace_models.rope import Rope
    from headrace_models.weights import Checkpoint

__all__ = ["build_dense"]


def build_dense(config: ModelConfig, checkpoint: Checkpoint, *, on_gpu: bool) -> DenseModel:
    """Build the model of a checkpoint; takes all tensors out of it.

    Args:
        on_gpu: use MLX's rope kernel and one product for gate and up, rather than the forms that suit a CPU.

    Raises:
        WeightMismatch: listing missing, unexpected and misshapen tensors.
        UnsupportedArchitecture: for a model type or a setting that no family computes.
    """
    check_num_layers(config, checkpoint.tensors)
    plan = make_plan(config)
    factors = checkpoint.take_rope_factors()
    checkpoint.check(tensor_shapes(config))
    builder = _Builder(config=config, plan=plan, checkpoint=checkpoint, on_gpu=on_gpu)
    model = DenseModel(
        config=config,
        ropes=[builder.rope(rope, factors if index == 0 else None) for index, rope in enumerate(plan.ropes)],
        layers=[builder.layer(index) for index in range(config.num_hidden_layers)],
        embedding=Embedding(checkpoint.take_matrix("model.embed_tokens"), plan.embedding_scale),
        norm=builder.norm("model.norm"),
        head=None if config.tie_word_embeddings else checkpoint.take_linear("lm_head"),
        logit_divisor=plan.logit_divisor,
        logit_softcap=plan.logit_softcap,
    )
    checkpoint.settle(model.arrays())
    model.weights_bytes = sum(array.nbytes for array in model.arrays())
    return model


@frozen(kw_only=True)
class _Builder:
    """The parts of one model."""

    config: ModelConfig
    plan: Plan
    checkpoint: Checkpoint
    on_gpu: bool

    def rope(self, rope: RopePlan, factors: Sequence[float] | None) -> Rope:
        angles = rope_angles(
            rope.size, rope.base, rope.scaling, max_positions=self.config.max_positions, factors=factors
        )
        form = FusedRope if self.on_gpu else AngleRope
        return form.from_angles(angles, is_traditional=rope.is_traditional)

    def layer(self, index: int) -> DenseLayer:
        prefix, norms = f"model.layers.{index}.", self.plan.family.norms
        layer = DenseLayer(
            attention=self._attention(f"{prefix}self_attn.", index),
            around_attention=self._residual(prefix, norms.before_attention, norms.after_attention),
            feed_forward=self._feed_forward(f"{prefix}mlp."),
            around_feed_forward=self._residual(prefix, norms.before_feed_forward, norms.after_feed_forward),
        )
        self.checkpoint.settle(layer.arrays())
        return layer

    def norm(self, path: str) -> Norm | LayerNorm:
        kind, epsilon = self.plan.family.norm, self.config.rms_norm_eps
        gain = self.checkpoint.take_vector(f"{path}.weight", plus=1.0 if kind == "rms_plus_one" else None)
        if kind == "layer":
            return LayerNorm(gain, self.checkpoint.take_vector(f"{path}.bias"), epsilon)
        return Norm(gain, epsilon)

    def _residual(self, prefix: str, entry: str | None, exit_: str | None) -> Residual:
        return Residual(
            entry=None if entry is None else self.norm(prefix + entry),
            exit=None if exit_ is None else self.norm(prefix + exit_),
            scale=self.plan.residual_scale,
        )

    def _attention(self, prefix: str, index: int) -> Attention:
        config, plan = self.config, self.plan
        return Attention(
            qkv=self._qkv(prefix),
            out=self.checkpoint.take_linear(f"{prefix}o_proj"),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            scale=plan.attention_scale,
            window=plan.windows[index],
            softcap=plan.attention_softcap,
            rope_index=plan.rope_indices[index],
            each_head_norm=self._each_head_norm(prefix) if plan.family.head_norm == "each" else None,
            whole_norm=self._whole_norm(prefix) if plan.family.head_norm == "all" else None,
        )

    def _qkv(self, prefix: str) -> Projection:
        if self.plan.family.stacks_qkv:
            return self.checkpoint.take_linear(f"{prefix}qkv_proj")
        return fuse([self.checkpoint.take_linear(f"{prefix}{name}_proj") for name in "qkv"])

    def _each_head_norm(self, prefix: str) -> EachHeadNorm:
        plus = 1.0 if self.plan.family.norm == "rms_plus_one" else None
        return EachHeadNorm.from_parts(
            self.checkpoint.take_vector(f"{prefix}q_norm.weight", plus=plus),
            self.checkpoint.take_vector(f"{prefix}k_norm.weight", plus=plus),
            num_heads=self.config.num_attention_heads,
            num_kv_heads=self.config.num_key_value_heads,
            epsilon=self.config.rms_norm_eps,
        )

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
