"""What a checkpoint holds, from its files' headers: names, shapes and element types. No tensor is read."""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

from attrs import field, frozen

from headrace_models.errors import UnsupportedFormat
from headrace_models.folder import weight_files
from headrace_models.gguf_file import read_gguf
from headrace_models.wrappers import part_names

if TYPE_CHECKING:
    from headrace_models.gguf_file import GgufFile, GgufTensor
    from headrace_models.sources import ModelSource

__all__ = ["PACKED_GGUF_TYPES", "CheckpointHeaders", "TensorHeader", "read_headers"]

_MAX_HEADER_BYTES = 1 << 27
# ggml's type -> bits per weight, in groups of 32, as MLX reads it. The others of a file decode to plain numbers.
PACKED_GGUF_TYPES: Mapping[str, int] = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_GGUF_PLAIN = {"F32": "float32", "F16": "float16"}
_GGUF_GROUP = 32
_SAFETENSORS_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "U8": "uint8"}


@frozen
class TensorHeader:
    """A tensor as it lies in the file.

    Attributes:
        shape: row-major; of the packed words where it is packed.
        dtype: MLX's name of the element type.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@frozen
class CheckpointHeaders:
    """The tensors of a checkpoint's text model as MLX will see them, under the names of its kind of file.

    Attributes:
        tensors: by name; packed matrices have `.scales` and, in the affine mode, `.biases` beside them.
        embedding: name of the token embedding, without `.weight`.
        left_out: how many tensors belong to parts that are no text model, by part.
    """

    tensors: Mapping[str, TensorHeader]
    embedding: str
    left_out: Mapping[str, int] = field(factory=dict[str, int])

    @property
    def is_packed(self) -> bool:
        """Whether any matrix is quantized."""
        return any(name.endswith(".scales") for name in self.tensors)

    @property
    def dtype(self) -> str:
        """Element type of the activations: that of the embedding, or of its scales."""
        for part in ("scales", "weight"):
            found = self.tensors.get(f"{self.embedding}.{part}")
            if found is not None and found.dtype in ("float32", "float16", "bfloat16"):
                return found.dtype
        return "float32"


def read_headers(source: "ModelSource", *, gguf: "GgufFile | None" = None) -> CheckpointHeaders:
    """Read the headers of a model's weight files.

    Args:
        source: the model's files.
        gguf: the file's head, when the caller has parsed it already.

    Raises:
        SourceError: files are missing or cut short.
        UnsupportedFormat: a file is not what its name says.
    """
    if source.format == "gguf":
        return CheckpointHeaders(_gguf_tensors(gguf or read_gguf(source.path)), "token_embd")
    tensors: dict[str, TensorHeader] = {}
    for file in weight_files(source.path):
        tensors |= _safetensors(file)
    names = part_names(tensors)
    return CheckpointHeaders(
        {own: tensors[name] for own, name in names.text.items()}, "model.embed_tokens", names.left_out
    )


def _safetensors(path: Path) -> dict[str, TensorHeader]:
    """Parse a safetensors header: its length as eight bytes, then JSON from names to dtype and shape."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            found = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        entries = cast("dict[str, dict[str, list[int] | str]]", found)
        return {
            name: TensorHeader(tuple(cast("list[int]", entry["shape"])), _dtype_name(cast("str", entry["dtype"])))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedFormat(f"{str(path)!r} cannot be read as safetensors ({error}): fetch it again") from error


def _dtype_name(name: str) -> str:
    return _SAFETENSORS_TYPES.get(name, name.lower())


def _gguf_tensors(file: "GgufFile") -> dict[str, TensorHeader]:
    known = set(PACKED_GGUF_TYPES) | set(_GGUF_PLAIN)
    # One type that MLX does not read, and all tensors of the file are decoded to float32.
    is_mlx = all(tensor.type in known for tensor in file.tensors.values())
    tensors: dict[str, TensorHeader] = {}
    for name, tensor in file.tensors.items():
        tensors |= _gguf_tensor(name, tensor, is_mlx=is_mlx)
    return tensors


def _gguf_tensor(name: str, tensor: "GgufTensor", *, is_mlx: bool) -> dict[str, TensorHeader]:
    bits = PACKED_GGUF_TYPES.get(tensor.type)
    if not is_mlx or bits is None:
        return {name: TensorHeader(tensor.shape, _GGUF_PLAIN[tensor.type] if is_mlx else "float32")}
    *rows, columns = tensor.shape
    groups = TensorHeader((*rows, columns // _GGUF_GROUP), "float16")
    path = name.removesuffix(".weight")
    codes = TensorHeader((*rows, columns * bits // 32), "uint32")
    return {name: codes, f"{path}.scales": groups, f"{path}.biases": groups}
