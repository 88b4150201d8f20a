"""A Whisper checkpoint of any format as tensors under one set of names: those of MLX folders, which are OpenAI's.

Convolutions are `(out, kernel, in)`, as MLX has them. Every matrix is `(out, in)`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np

from headrace_models.errors import UnsupportedFormat
from headrace_models.row_blocks import StoredTensor
from headrace_models.weights import Checkpoint
from headrace_models.whisper.config import (
    WhisperConfig,
    read_alignment_heads,
    read_mlx_config,
    read_transformers_config,
)
from headrace_models.whisper.ctranslate2 import BinaryFile, read_variable, scan_variables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from headrace_models.whisper.ctranslate2 import Variable
    from headrace_models.whisper.sources import WhisperSource

__all__ = ["open_whisper_checkpoint"]

_Tensors = dict[str, "mx.array | StoredTensor"]

# What some converters write beside the weights: masks, and positions that are the usual sinusoids.
_IGNORED = re.compile(r"(encoder\._?positional_embedding|decoder\._?mask|proj_out\.weight)")
_ALIGNMENT = "alignment_heads"

_FROM_TRANSFORMERS = (
    (r"^model\.", ""),
    (r"^(encoder|decoder)\.layers\.", r"\1.blocks."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.out_proj\.", ".out."),
    (r"\.fc1\.", ".mlp1."),
    (r"\.fc2\.", ".mlp2."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"^decoder\.embed_tokens\.", "decoder.token_embedding."),
    (r"^(encoder|decoder)\.embed_positions\.weight$", r"\1.positional_embedding"),
)
_FROM_CTRANSLATE2 = (
    (r"/", "."),
    (r"^(encoder|decoder)\.layer_(\d+)\.", r"\1.blocks.\2."),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"\.self_attention\.layer_norm\.", ".attn_ln."),
    (r"\.attention\.layer_norm\.", ".cross_attn_ln."),
    (r"\.ffn\.layer_norm\.", ".mlp_ln."),
    (r"\.ffn\.linear_0\.", ".mlp1."),
    (r"\.ffn\.linear_1\.", ".mlp2."),
    (r"\.self_attention\.linear_0\.", ".attn.query+key+value."),
    (r"\.self_attention\.linear_1\.", ".attn.out."),
    (r"\.attention\.linear_0\.", ".cross_attn.query."),
    (r"\.attention\.linear_1\.", ".cross_attn.key+value."),
    (r"\.attention\.linear_2\.", ".cross_attn.out."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"^decoder\.embeddings\.", "decoder.token_embedding."),
    (r"^(encoder|decoder)\.position_encodings\.encodings$", r"\1.positional_embedding"),
)
_JOINED = re.compile(r"\.((?:\w+\+)+\w+)\.")


def open_whisper_checkpoint(source: WhisperSource) -> tuple[WhisperConfig, Checkpoint]:
    """Open a source's configuration and weights; numbers are read when they are taken.

    Raises:
        SourceError: the configuration lacks something.
        UnsupportedFormat: a file is not what it should be.
    """
    match source.format:
        case "mlx":
            config, tensors = _open_mlx(source)
        case "transformers":
            config = read_transformers_config(source.folder)
            tensors = _renamed_transformers(_load(source.weights))
        case "ctranslate2":
            config, tensors = _open_ctranslate2(source)
    return config, Checkpoint({name: tensor for name, tensor in tensors.items() if not _IGNORED.fullmatch(name)})


def _load(paths: Sequence[Path]) -> _Tensors:
    tensors: _Tensors = {}
    for path in paths:
        try:
            tensors |= cast("dict[str, mx.array]", mx.load(str(path)))
        except (RuntimeError, ValueError) as error:
            raise UnsupportedFormat(f"{str(path)!r} cannot be read ({error}): fetch it again") from error
    return tensors


def _open_mlx(source: WhisperSource) -> tuple[WhisperConfig, _Tensors]:
    tensors = _load(source.weights)
    config = read_mlx_config(source.folder / "config.json")
    heads = tensors.pop(_ALIGNMENT, None)
    if isinstance(heads, mx.array) and heads.ndim == len(("head", "pair")):
        pairs = np.array(heads.astype(mx.int32)).tolist()
        config = config.with_alignment_heads(read_alignment_heads({_ALIGNMENT: pairs}))
    return config, tensors


def _renamed_transformers(tensors: _Tensors) -> _Tensors:
    renamed: _Tensors = {}
    for name, tensor in tensors.items():
        new = _rename(name, _FROM_TRANSFORMERS)
        is_conv = new.startswith(("encoder.conv1.weight", "encoder.conv2.weight"))
        renamed[new] = tensor.swapaxes(1, 2) if is_conv and isinstance(tensor, mx.array) else tensor
    return renamed


def _open_ctranslate2(source: WhisperSource) -> tuple[WhisperConfig, _Tensors]:
    from headrace_models.folder import read_json_object

    file = BinaryFile.open(source.weights)
    variables = scan_variables(file)
    config = _ctranslate2_config(file, variables)
    settings = read_json_object(source.folder / "config.json")
    tensors: _Tensors = {}
    for name, variable in variables.items():
        if name.endswith("weight_scale") or not variable.shape:
            continue
        reader = _Reader(file, variable, variables.get(f"{name}_scale"))
        new = _rename(name, _FROM_CTRANSLATE2)
        for part, first, last in _parts(new, variable.shape[0]):
            tensors[part] = reader.stored(first, last, is_conv=".conv" in new and new.endswith("weight"))
    # Keys have no bias; the zeros of the joined matrices are no tensors of the model.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".key.bias")}
    return config.with_alignment_heads(read_alignment_heads(settings)), tensors


class _Reader:
    """Reads rows of a variable, multiplied out where they are 8-bit with a scale per row."""

    def __init__(self, file: BinaryFile, variable: Variable, scale: Variable | None) -> None:
        self._file, self._variable, self._scale = file, variable, scale
        if variable.dtype in {"<i1", "<i2", "<i4"} and scale is None:
            raise UnsupportedFormat(f"variable {variable.name!r} holds integers without a scale: convert it to float16")

    def stored(self, first: int, last: int, *, is_conv: bool) -> StoredTensor:
        shape = (last - first, *self._variable.shape[1:])
        if is_conv:
            shape = (shape[0], shape[2], shape[1])
        return StoredTensor(shape=shape, blocks=lambda: [self._rows(first, last, is_conv=is_conv)])

    def _rows(self, first: int, last: int, *, is_conv: bool) -> mx.array:
        rows: NDArray[Any] = read_variable(self._file, self._variable, first, last)
        if self._scale is not None:
            scale = read_variable(self._file, self._scale).astype(np.float32).reshape(-1)[first:last]
            rows = rows.astype(np.float32) / scale.reshape(-1, *[1] * (rows.ndim - 1))
        return mx.array(np.ascontiguousarray(rows.swapaxes(1, 2)) if is_conv else rows)


def _parts(name: str, num_rows: int) -> list[tuple[str, int, int]]:
    """Take a joined matrix apart: `a.key+value.weight` of 2N rows is `a.key.weight` and `a.value.weight`."""
    joined = _JOINED.search(name)
    if joined is None:
        return [(name, 0, num_rows)]
    modules = joined[1].split("+")
    step = num_rows // len(modules)
    return [
        (name.replace(joined[0], f".{module}."), index * step, (index + 1) * step)
        for index, module in enumerate(modules)
    ]


def _ctranslate2_config(file: BinaryFile, variables: Mapping[str, Variable]) -> WhisperConfig:
    """Read sizes off the shapes, as the format has no list of them."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        found = variables.get(name)
        if found is None or len(found.shape) != rank:
            raise UnsupportedFormat(f"{str(file.path)!r} has no variable {name!r}; it is no Whisper model")
        return found.shape

    def heads(side: str) -> int:
        variable = variables.get(f"{side}/num_heads")
        if variable is None:
            raise UnsupportedFormat(f"{str(file.path)!r} has no variable '{side}/num_heads'")
        return int(read_variable(file, variable).reshape(-1)[0])

    def layers(side: str) -> int:
        indices = {int(found[1]) for name in variables if (found := re.match(rf"{side}/layer_(\d+)/", name))}
        return max(indices, default=-1) + 1

    vocab_size, state = shape("decoder/embeddings/weight", 2)
    return WhisperConfig(
        num_mels=shape("encoder/conv1/weight", 3)[1],
        audio_context=shape("encoder/position_encodings/encodings", 2)[0],
        audio_state=shape("encoder/conv1/weight", 3)[0],
        audio_heads=heads("encoder"),
        audio_layers=layers("encoder"),
        vocab_size=vocab_size,
        text_context=shape("decoder/position_encodings/encodings", 2)[0],
        text_state=state,
        text_heads=heads("decoder"),
        text_layers=layers("decoder"),
        is_multilingual=vocab_size >= 51_865,
    )


def _rename(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
