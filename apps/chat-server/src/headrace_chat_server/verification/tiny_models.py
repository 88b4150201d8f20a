"""Tiny random models in each representation, for laws that need no real weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_models import GenerationDefaults, ModelConfig
from headrace_models.building import build_dense
from headrace_models.tensors import tensor_shapes
from headrace_models.weights import Checkpoint, WeightForm

if TYPE_CHECKING:
    from headrace_models.dense import DenseModel

__all__ = ["TINY_VOCAB", "TINY_WINDOW", "tiny_model"]

TINY_VOCAB, TINY_WINDOW = 256, 24
_HEAD_DIM, _GROUP = 64, 64


def tiny_model(dtype: mx.Dtype, *, bits: int | None, on_gpu: bool) -> DenseModel:
    """Make a model of three layers, two of them with rings, from random weights.

    Args:
        dtype: of activations.
        bits: of matrices; None keeps them in `dtype`.
        on_gpu: whether to build the forms that suit a GPU.
    """
    config = _config()
    tensors = _tensors(config)
    if bits is not None:
        tensors = _packed(tensors, bits, dtype)
    checkpoint = Checkpoint({**tensors})
    checkpoint.form = WeightForm(dtype=dtype, keep_packed=True)
    return build_dense(config, checkpoint, on_gpu=on_gpu)


def _config() -> ModelConfig:
    return ModelConfig(
        model_type="gemma3_text",
        vocab_size=TINY_VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=_HEAD_DIM,
        rms_norm_eps=1e-6,
        hidden_act="gelu_pytorch_tanh",
        rope_theta=1e6,
        rope_scaling=None,
        max_positions=4096,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_ids=frozenset(),
        dtype="float32",
        quantization=None,
        generation=GenerationDefaults(),
        raw={"sliding_window": TINY_WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": _HEAD_DIM},
    )


def _tensors(config: ModelConfig) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for index, (name, shape) in enumerate(tensor_shapes(config).items()):
        noise = mx.random.normal(shape, key=mx.random.key(index))
        tensors[name] = noise * 0.1 if len(shape) == 1 else noise * shape[-1] ** -0.5
    return tensors


def _packed(tensors: dict[str, mx.array], bits: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            found[name] = tensor
            continue
        path = name.removesuffix(".weight")
        codes, scales, biases = mx.quantize(tensor.astype(dtype), group_size=_GROUP, bits=bits)
        found |= {f"{path}.weight": codes, f"{path}.scales": scales, f"{path}.biases": biases}
    return found
