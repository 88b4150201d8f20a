"""Tensors of a GGUF file under Hugging Face names and conventions, packed where MLX has the packing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import mlx.core as mx
from attrs import evolve

from headrace_models.errors import UnsupportedFormat
from headrace_models.gguf_families import gguf_family_of
from headrace_models.gguf_file import check_dequantizable, dequantize_rows, read_gguf
from headrace_models.row_blocks import StoredTensor, rows_per_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from headrace_models.gguf_file import GgufFile, GgufTensor

__all__ = ["read_gguf_tensors"]

_MLX_TYPES = frozenset({"F32", "F16", "Q4_0", "Q4_1", "Q8_0"})

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Read with the configuration, which they belong to.
_ROPE_FACTORS = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})


def read_gguf_tensors(
    path: Path, *, model_type: str, num_heads: int, num_kv_heads: int
) -> dict[str, mx.array | StoredTensor]:
    """Read a file's tensors in Hugging Face's names and row order.

    Q4_0, Q4_1 and Q8_0 stay packed as `weight`, `scales` and `biases`, when all types of the file are among those
    that MLX reads; otherwise each is dequantized by the `gguf` package when it is taken.

    Args:
        model_type: Hugging Face's name of the architecture.
        num_heads: query heads; llama.cpp stores the rows of q and k in another order per head.
        num_kv_heads: key heads.

    Raises:
        UnsupportedFormat: for a file or a tensor type that cannot be read.
        UnsupportedArchitecture: for a model type whose GGUF names are not known.
    """
    family = gguf_family_of(model_type)
    file = read_gguf(path)
    types = {tensor.type for tensor in file.tensors.values()}
    tensors = _read_packed(path) if types <= _MLX_TYPES else _stored_tensors(file)
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if family.has_paired_rows else {}
    renamed: dict[str, mx.array | StoredTensor] = {}
    for name, tensor in tensors.items():
        if name in _ROPE_FACTORS:
            continue
        module = name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
        finish = None
        if module in heads:
            finish = partial(_restore_rows, num_heads=heads[module])
        elif family.has_shifted_norms and module.endswith("_norm"):
            finish = _without_one
        renamed[_hugging_face_name(name, family.names)] = _finished(tensor, finish)
    return renamed


def _finished(
    tensor: mx.array | StoredTensor, finish: Callable[[mx.array], mx.array] | None
) -> mx.array | StoredTensor:
    if finish is None:
        return tensor
    return evolve(tensor, finish=finish) if isinstance(tensor, StoredTensor) else finish(tensor)


def _without_one(norm: mx.array) -> mx.array:
    return norm - 1


def _read_packed(path: Path) -> dict[str, mx.array | StoredTensor]:
    try:
        return cast("dict[str, mx.array | StoredTensor]", mx.load(str(path)))
    except RuntimeError as error:
        raise UnsupportedFormat(f"{str(path)!r} cannot be read as GGUF ({error}): fetch it again") from error


def _stored_tensors(file: GgufFile) -> dict[str, mx.array | StoredTensor]:
    check_dequantizable(file)
    return {name: _stored(file, tensor) for name, tensor in file.tensors.items()}


def _stored(file: GgufFile, tensor: GgufTensor) -> StoredTensor:
    def blocks() -> Iterator[mx.array]:
        return (mx.array(rows) for rows in dequantize_rows(file, tensor, num_rows=rows_per_block(tensor.shape[-1])))

    return StoredTensor(shape=tensor.shape, blocks=blocks)


def _hugging_face_name(name: str, in_layer: Mapping[str, str]) -> str:
    """Translate `blk.0.attn_q.weight`; a name that is not known stays, and is reported as unexpected later."""
    path, _, part = name.rpartition(".")
    if path.startswith("blk."):
        _, index, module = path.split(".", 2)
        return f"model.layers.{index}.{in_layer[module]}.{part}" if module in in_layer else name
    return f"{_TOP_LEVEL[path]}.{part}" if path in _TOP_LEVEL else name


def _restore_rows(tensor: mx.array, num_heads: int) -> mx.array:
    """Undo llama.cpp's order of q and k rows: per head (half, 2) back to (2, half).

    It is a permutation of rows alone, so it holds for packed codes and scales as for numbers.
    """
    rows = tensor.shape[0]
    return tensor.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(tensor.shape)
