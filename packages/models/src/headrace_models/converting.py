"""Conversion of any loadable model to a folder quantized by MLX, with bits per matrix, which mlx-lm reads too."""

from __future__ import annotations

import errno
import json
import shutil
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_models.config import read_config
from headrace_models.draft_folder import check_free, draft_folder
from headrace_models.exporting import open_plain, unwritable
from headrace_models.packing_plan import RECIPES, check_packing, plan_packing
from headrace_models.row_blocks import rows_per_block
from headrace_models.sources import ModelSource, resolve
from headrace_models.tokenizer_files import tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import mlx.core as mx

    from headrace_models.exporting import ExportDtype
    from headrace_models.packing_plan import BitsRule, Packing
    from headrace_models.weights import Checkpoint

__all__ = ["convert"]

_SHARD_BYTES = 2**30
_PLAIN_BITS = 32
_PARTS = ("weight", "scales", "biases")


def convert(
    source: str | Path | ModelSource,
    folder: str | Path,
    *,
    bits: int = 4,
    group_size: int = 64,
    dtype: ExportDtype | None = None,
    recipe: str | None = None,
    rules: Sequence[BitsRule] = (),
    download: bool = True,
    progress: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Quantize a model and write it as a new folder, which appears whole or not at all. Imports mlx.

    Matrices are read, packed by blocks of rows and written one after the other: memory holds the largest of them
    and one file of a gigabyte. A model that is quantized already is dequantized first, which loses quality twice.

    Args:
        source: as `load` takes it.
        folder: does not exist yet, or is empty.
        bits: of every matrix that nothing else decides: 2, 3, 4, 5, 6 or 8.
        group_size: weights that share a scale: 32, 64 or 128.
        dtype: of everything unpacked, and of scales; None is the checkpoint's own.
        recipe: one of `RECIPES`, which then decides the bits.
        rules: bits by module path, over the others; see `read_bits_file`.
        download: whether files may be fetched.
        progress: whether fetching shows its progress.
        on_progress: called with the number of weights done and of all.

    Returns:
        The folder.

    Raises:
        ValueError: for bits, group sizes, types, recipes and rules that cannot be.
        SourceError: the folder is not empty, or the name leads to no model.
        UnsupportedArchitecture: no family knows the model's tensors.
        WeightMismatch: weights and configuration contradict each other.
        OSError: the folder cannot be written, for example because the disk is full.
    """
    packing = check_packing(bits, group_size)
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; choose float32, bfloat16 or float16.")
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; choose one of {', '.join(RECIPES)}.")
    target = Path(folder).expanduser().absolute()
    check_free(target)
    found = source if isinstance(source, ModelSource) else resolve(source, download=download, progress=progress)
    config = read_config(found)
    checkpoint, shapes = open_plain(found, config, dtype)
    plan = plan_packing(shapes, packing, recipe=recipe, rules=rules, num_layers=config.num_hidden_layers)
    with draft_folder(target) as draft:
        shards = _plan_shards(shapes, plan)
        _check_space(draft, sum(size for _, size in shards))
        _write_shards(checkpoint, [names for names, _ in shards], shapes, plan, draft, on_progress)
        settings = {key: value for key, value in config.raw.items() if not key.startswith("quantization")}
        settings["tie_word_embeddings"] = config.tie_word_embeddings
        settings["torch_dtype"] = str(_dtype_of(checkpoint)).removeprefix("mlx.core.")
        settings.pop("dtype", None)
        # The second name is what Hugging Face's own tools look for.
        settings["quantization"] = settings["quantization_config"] = _quantization(plan, packing, recipe)
        (draft / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        tokenizer_files(found, draft)
    return target


def _dtype_of(checkpoint: Checkpoint) -> mx.Dtype:
    assert checkpoint.form is not None
    return checkpoint.form.dtype


def _quantization(plan: Mapping[str, Packing | None], packing: Packing, recipe: str | None) -> dict[str, object]:
    """Write defaults, and every module that differs from them, in MLX's form."""
    bits = packing.bits if recipe is None else RECIPES[recipe][0]
    found: dict[str, object] = {"group_size": packing.group_size, "bits": bits, "mode": "affine"}
    for path, one in plan.items():
        if one is None:
            found[path] = False
        elif (one.bits, one.group_size) != (bits, packing.group_size):
            found[path] = {"group_size": one.group_size, "bits": one.bits, "mode": "affine"}
    return found


def _plan_shards(
    shapes: Mapping[str, tuple[int, ...]], plan: Mapping[str, Packing | None]
) -> list[tuple[list[str], int]]:
    """Cut the tensors into files of about a gigabyte, in order, and say how many bytes each may take at most."""
    shards: list[tuple[list[str], int]] = []
    for name, shape in shapes.items():
        packing = plan.get(name.removesuffix(".weight"))
        size = int(prod(shape) * (_PLAIN_BITS if packing is None else packing.most_bits_per_weight)) // 8
        if not shards or shards[-1][1] + size > _SHARD_BYTES:
            shards.append(([], 0))
        names, total = shards[-1]
        shards[-1] = ([*names, name], total + size)
    return shards


def _check_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"up to {num_bytes / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free: free space there, or choose "
            "another folder",
            str(folder.parent),
        )


def _write_shards(
    checkpoint: Checkpoint,
    shards: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    plan: Mapping[str, Packing | None],
    folder: Path,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    import mlx.core as mx

    sizes = {name: prod(shape) for name, shape in shapes.items()}
    total, done = sum(sizes.values()), 0
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, mx.array] = {}
        for name in names:
            tensors |= _take(checkpoint, name, plan.get(name.removesuffix(".weight")))
            done += sizes[name]
            if on_progress is not None:
                on_progress(done, total)
        try:
            mx.save_safetensors(str(folder / file), tensors, metadata={"format": "mlx"})
        except RuntimeError as error:
            raise unwritable(folder.parent, error) from error
        weight_map |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def _take(checkpoint: Checkpoint, name: str, packing: Packing | None) -> dict[str, mx.array]:
    """Take a tensor out of the checkpoint, packed as planned, with all of its arrays evaluated."""
    import mlx.core as mx

    tensor = checkpoint.take_tensor(name)
    if packing is None:
        mx.eval(tensor)
        return {name: tensor}
    parts: list[list[mx.array]] = [[], [], []]
    step = rows_per_block(tensor.shape[-1])
    for start in range(0, tensor.shape[0], step):
        block = mx.quantize(tensor[start : start + step], group_size=packing.group_size, bits=packing.bits)
        mx.eval(block)
        for part, array in zip(parts, block, strict=True):
            part.append(array)
    path = name.removesuffix(".weight")
    packed = {f"{path}.{part}": mx.concatenate(arrays) for part, arrays in zip(_PARTS, parts, strict=True)}
    mx.eval(packed)
    return packed
