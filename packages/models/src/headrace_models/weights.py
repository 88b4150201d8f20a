"""Checkpoints: named tensors from safetensors shards or a GGUF file, checked as a whole and taken one by one.

Names are Hugging Face's, whatever the file. Nothing is read from disk before it is evaluated, and a tensor that was
taken is no longer held here, so that a family can build, evaluate and free layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx
from attrs import define, field, frozen

from headrace_models.assembly import reading_stream
from headrace_models.errors import UnsupportedFormat, WeightMismatch
from headrace_models.folder import weight_files
from headrace_models.layers import Dense, Linear, Packed
from headrace_models.row_blocks import StoredTensor
from headrace_models.wrappers import part_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace_models.config import ModelConfig
    from headrace_models.layers import PackingMode, Weight
    from headrace_models.sources import ModelSource

__all__ = ["Checkpoint", "WeightForm", "open_checkpoint", "read_folder_tensors"]

_MAX_LISTED = 12
_MOST_PER_WORD = 8


@frozen(kw_only=True)
class WeightForm:
    """What weights become when they are loaded."""

    dtype: mx.Dtype
    """Of everything that is not packed, and of the activations."""
    keep_packed: bool
    """Whether quantized matrices stay so; otherwise they are dequantized to `dtype`."""


@define
class Checkpoint:
    """A model's tensors by Hugging Face name; reading is lazy, taking removes."""

    tensors: dict[str, mx.array | StoredTensor]
    form: WeightForm | None = None
    """Decided after the tensors are seen and before any is taken."""
    left_out: Mapping[str, int] = field(factory=dict[str, int])
    """Tensors of parts that are no text model, counted by part."""
    _shapes: dict[str, tuple[int, ...]] = field(factory=dict)

    @property
    def is_packed(self) -> bool:
        """Whether any matrix is quantized."""
        return any(name.endswith(".scales") for name in self.tensors)

    @property
    def is_decoded(self) -> bool:
        """Whether any tensor is stored in a form that MLX has not, and becomes floating point."""
        return any(isinstance(tensor, StoredTensor) for tensor in self.tensors.values())

    @property
    def dtype(self) -> mx.Dtype:
        """The type of the checkpoint's activations: that of its embedding, or of the embedding's scales."""
        for name in ("model.embed_tokens.scales", "model.embed_tokens.weight"):
            if name in self.tensors and mx.issubdtype(self.tensors[name].dtype, mx.floating):
                return self.tensors[name].dtype
        return mx.float32

    @property
    def num_weights(self) -> int:
        """Number of weights once nothing is packed; a packed word is counted as eight, as of 4 bits."""
        return sum(
            tensor.size * _MOST_PER_WORD if tensor.dtype == mx.uint32 else tensor.size
            for name, tensor in self.tensors.items()
            if not name.endswith((".scales", ".biases"))
        )

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Hold the tensors against what the configuration promises, and drop the known ones that no family reads.

        Args:
            shapes: every needed tensor with its unpacked shape.

        Raises:
            WeightMismatch: listing what is missing, unexpected or misshapen.
        """
        self._shapes = dict(shapes)
        for name in [name for name in self.tensors if name not in shapes and _is_ignorable(name, shapes)]:
            del self.tensors[name]
        missing = [name for name in shapes if name not in self.tensors]
        unexpected = [name for name in self.tensors if name not in shapes and not self._is_part_of_packed(name)]
        misshapen = [
            f"{name} {self.tensors[name].shape} instead of {shape}"
            for name, shape in shapes.items()
            if name in self.tensors and not self._fits(name, shape)
        ]
        problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
        found = [f"{kind}: {_listed(names)}" for kind, names in problems.items() if names]
        if found:
            raise WeightMismatch(
                f"The weights do not fit the configuration; {'; '.join(found)}. "
                "Check that config.json and the weight files belong together and that the download is complete."
            )

    def take_matrix(self, path: str) -> Weight:
        """Take `path.weight` (and its scales) as a matrix in the wanted form."""
        form = self._wanted()
        if f"{path}.scales" not in self.tensors:
            return Dense(_read(self.tensors.pop(f"{path}.weight"), form.dtype))
        packed = self._packed(path)
        for part in ("weight", "scales", "biases"):
            self.tensors.pop(f"{path}.{part}", None)
        if form.keep_packed:
            return packed.with_activations(form.dtype)
        return Dense(packed.dequantize(form.dtype))

    def take_linear(self, path: str) -> Linear:
        """Take a matrix with its bias, if it has one."""
        bias = self.tensors.pop(f"{path}.bias", None)
        return Linear(self.take_matrix(path), None if bias is None else _read(bias, self._wanted().dtype))

    def take_vector(self, name: str, *, plus: float | None = None) -> mx.array:
        """Take a vector, such as a norm's gain, and add a number, rounding once."""
        vector = self.tensors.pop(name)
        dtype = self._wanted().dtype
        return _read(vector, dtype) if plus is None else (_read(vector, mx.float32) + plus).astype(dtype)

    def take_tensor(self, name: str) -> mx.array:
        """Take any tensor that was checked as one array, dequantized if it is packed."""
        if f"{name.removesuffix('.weight')}.scales" not in self.tensors:
            return self.take_vector(name)
        weight = self.take_matrix(name.removesuffix(".weight"))
        return cast("Dense", weight).matrix

    def take_rope_factors(self) -> list[float] | None:
        """Take the frequency divisors that GGUF files of Llama 3 carry as a tensor; None when there are none."""
        factors = self.tensors.pop("rope_freqs.weight", None)
        return None if factors is None else cast("list[float]", _read(factors, mx.float32).tolist())

    def _wanted(self) -> WeightForm:
        if self.form is None:
            raise WeightMismatch("No form was chosen for the checkpoint's weights; set `form` before taking any.")
        return self.form

    def _is_part_of_packed(self, name: str) -> bool:
        path, _, part = name.rpartition(".")
        return part in ("scales", "biases") and f"{path}.scales" in self.tensors and f"{path}.weight" in self._shapes

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        path = name.removesuffix(".weight")
        if f"{path}.scales" not in self.tensors:
            return tuple(self.tensors[name].shape) == shape
        codes, scales = self.tensors[name].shape, self.tensors[f"{path}.scales"].shape
        if len(codes) != len(shape) or codes[:-1] != scales[:-1] or tuple(codes[:-1]) != shape[:-1]:
            return False
        return codes[-1] * 32 % shape[-1] == 0 and shape[-1] % scales[-1] == 0

    def _packed(self, path: str) -> Packed:
        """Assemble a packed matrix; bits and group size follow from the shapes, which hold per layer by nature."""
        codes, scales = (cast("mx.array", self.tensors[f"{path}.{part}"]) for part in ("weight", "scales"))
        columns = self._shapes[f"{path}.weight"][-1]
        bits, group_size = codes.shape[-1] * 32 // columns, columns // scales.shape[-1]
        offsets = cast("mx.array | None", self.tensors.get(f"{path}.biases"))
        return Packed(codes, scales, offsets, bits, group_size, _packing_mode(path, scales, offsets, bits, group_size))


def open_checkpoint(source: ModelSource, config: ModelConfig) -> Checkpoint:
    """Open a source's weights; nothing but headers is read yet (a GGUF whose types MLX packs is read at once).

    Raises:
        UnsupportedFormat: for files and tensor types that are not read.
        SourceError: for missing shards.
    """
    if source.format == "gguf":
        from headrace_models.gguf_weights import read_gguf_tensors

        return Checkpoint(
            read_gguf_tensors(
                source.path,
                model_type=config.model_type,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
            )
        )
    tensors = read_folder_tensors(source.path)
    names = part_names(tensors)
    return Checkpoint({own: tensors[name] for own, name in names.text.items()}, left_out=names.left_out)


def read_folder_tensors(folder: Path) -> dict[str, mx.array]:
    """Read the tensors of all safetensors shards of a folder, lazily.

    Raises:
        UnsupportedFormat: for a file that is not safetensors, or is cut short.
    """
    tensors: dict[str, mx.array] = {}
    for file in weight_files(folder):
        try:
            tensors |= cast("dict[str, mx.array]", mx.load(str(file), stream=reading_stream()))
        except RuntimeError as error:
            raise UnsupportedFormat(f"{str(file)!r} cannot be read as safetensors ({error}): fetch it again") from error
    return tensors


def _read(tensor: mx.array | StoredTensor, dtype: mx.Dtype) -> mx.array:
    return tensor.read(dtype) if isinstance(tensor, StoredTensor) else tensor.astype(dtype)


def _is_ignorable(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    is_tied_copy = name.startswith("lm_head.") and "lm_head.weight" not in shapes
    return is_tied_copy or name.endswith("rotary_emb.inv_freq") or _is_unread_key(name, shapes)


def _is_unread_key(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a tensor makes keys or values of a layer that attends to another layer's."""
    path, _, module = name.rpartition(".")[0].rpartition(".")
    is_sharing = f"{path}.q_proj.weight" in shapes and f"{path}.k_proj.weight" not in shapes
    return is_sharing and module in ("k_proj", "v_proj", "k_norm")


def _packing_mode(path: str, scales: mx.array, offsets: mx.array | None, bits: int, group_size: int) -> PackingMode:
    if offsets is not None:
        return "affine"
    modes: dict[tuple[int, int], PackingMode] = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
    mode = modes.get((bits, group_size))
    if mode is None or scales.dtype != mx.uint8:
        raise UnsupportedFormat(
            f"{path!r} has {bits}-bit weights in groups of {group_size} with {scales.dtype} scales and no biases; "
            "known are affine (with biases), mxfp4, nvfp4 and mxfp8. Convert the checkpoint to one of them."
        )
    return mode


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
