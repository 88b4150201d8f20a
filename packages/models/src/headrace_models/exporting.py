"""Export of any loadable model as a plain Hugging Face style folder, which mlx-lm and others read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace_models.config import read_config
from headrace_models.errors import SourceError, UnsupportedArchitecture
from headrace_models.sources import ModelSource, resolve
from headrace_models.tokenizer_files import tokenizer_files

if TYPE_CHECKING:
    from headrace_models.config import ModelConfig

__all__ = ["ExportDtype", "export"]

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
    _check_free(target)
    found = source if isinstance(source, ModelSource) else resolve(source, download=download, progress=progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(found, draft, dtype)
        _make_readable(draft)
        # rename replaces an empty folder and nothing else
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def _check_free(target: Path) -> None:
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not is_free:
        raise SourceError(f"{str(target)!r} exists and is not an empty folder; choose another or empty it.")


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

    from headrace_models.tensors import check_num_layers, tensor_shapes
    from headrace_models.weights import WeightForm, open_checkpoint

    form = WeightForm(
        dtype={"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[dtype], keep_packed=False
    )
    checkpoint = open_checkpoint(source, config)
    checkpoint.form = form
    if checkpoint.take_rope_factors() is not None and config.rope_scaling is None:
        raise UnsupportedArchitecture(
            "The GGUF file carries rope factors as a tensor, which config.json cannot express; "
            "export from the original Hugging Face folder."
        )
    check_num_layers(config, checkpoint.tensors)
    shapes = tensor_shapes(config)
    checkpoint.check(shapes)
    tensors = {name: checkpoint.take_tensor(name) for name in shapes}
    try:
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    except RuntimeError as error:
        # What MLX raises when the disk is full.
        raise OSError(
            f"the weights cannot be written below {str(folder.parent)!r} ({error}): free space there, or "
            "choose another folder"
        ) from error


def _make_readable(folder: Path) -> None:
    """Give the private temporary folder the mode that a plain mkdir would have."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
