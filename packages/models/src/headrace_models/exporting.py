"""Export of any loadable model as a plain Hugging Face style folder, which mlx-lm and others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace_models.config import read_config
from headrace_models.draft_folder import check_free, draft_folder
from headrace_models.errors import UnsupportedArchitecture
from headrace_models.sources import ModelSource, resolve
from headrace_models.tokenizer_files import tokenizer_files

if TYPE_CHECKING:
    from headrace_models.config import ModelConfig
    from headrace_models.weights import Checkpoint

__all__ = ["ExportDtype", "export", "open_plain", "unwritable"]

ExportDtype = Literal["float32", "bfloat16", "float16"]


def export(
    source: str | Path | ModelSource,
    folder: str | Path,
    *,
    dtype: ExportDtype = "float32",
    download: bool = True,
    progress: bool = False,
) -> Path:
    """Write config.json, model.safetensors, the tokenizer's files and generation_config.json to a new folder.

    The folder appears whole or not at all. Quantized weights are dequantized. Imports mlx.

    Args:
        source: as `load` takes it.
        folder: does not exist yet, or is empty.
        dtype: of all weights.
        download: whether files may be fetched.
        progress: whether fetching shows its progress.

    Returns:
        The folder.

    Raises:
        SourceError: the folder is not empty, or the name leads to no model.
        UnsupportedArchitecture: no family knows the model's tensors.
        WeightMismatch: weights and configuration contradict each other.
        OSError: the folder cannot be written, for example because the disk is full.
        ValueError: for an unknown `dtype`.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; choose float32, bfloat16 or float16.")
    target = Path(folder).expanduser().absolute()
    check_free(target)
    found = source if isinstance(source, ModelSource) else resolve(source, download=download, progress=progress)
    with draft_folder(target) as draft:
        _write(found, draft, dtype)
    return target


def _write(source: ModelSource, folder: Path, dtype: ExportDtype) -> None:
    config = read_config(source)
    _write_weights(source, config, folder, dtype)
    unpacked = {key: value for key, value in config.raw.items() if not key.startswith("quantization")}
    settings = {**unpacked, "torch_dtype": dtype, "tie_word_embeddings": config.tie_word_embeddings}
    settings.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    tokenizer_files(source, folder)


def _write_weights(source: ModelSource, config: ModelConfig, folder: Path, dtype: ExportDtype) -> None:
    import mlx.core as mx

    checkpoint, shapes = open_plain(source, config, dtype)
    tensors = {name: checkpoint.take_tensor(name) for name in shapes}
    try:
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    except RuntimeError as error:
        raise unwritable(folder.parent, error) from error


def open_plain(
    source: ModelSource, config: ModelConfig, dtype: ExportDtype | None
) -> tuple[Checkpoint, dict[str, tuple[int, ...]]]:
    """Open a checkpoint whose tensors, once taken, are plain and of one type; return it with the shapes it holds.

    Args:
        dtype: of what is taken; None is the checkpoint's own.

    Raises:
        UnsupportedArchitecture: config.json could not express the model.
        WeightMismatch: weights and configuration contradict each other.
    """
    import mlx.core as mx

    from headrace_models.tensors import check_num_layers, tensor_shapes
    from headrace_models.weights import WeightForm, open_checkpoint

    checkpoint = open_checkpoint(source, config)
    explicit = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
    checkpoint.form = WeightForm(dtype=checkpoint.dtype if dtype is None else explicit[dtype], keep_packed=False)
    if checkpoint.take_rope_factors() is not None and config.rope_scaling is None:
        raise UnsupportedArchitecture(
            "The GGUF file carries rope factors as a tensor, which config.json cannot express; "
            "export from the original Hugging Face folder."
        )
    check_num_layers(config, checkpoint.tensors)
    shapes = tensor_shapes(config)
    checkpoint.check(shapes)
    return checkpoint, shapes


def unwritable(folder: Path, error: RuntimeError) -> OSError:
    """Make the error for what MLX raises when a disk is full."""
    return OSError(
        f"the weights cannot be written below {str(folder)!r} ({error}): free space there, or choose another folder"
    )
