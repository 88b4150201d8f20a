"""The files of a Hugging Face style model folder: which weights it has, and JSON read with clear errors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from headrace_models.errors import SourceError, UnsupportedFormat

__all__ = ["check_folder", "read_json_object", "weight_files"]

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_folder(folder: Path) -> None:
    """Check that a folder has a configuration, a tokenizer and all its weights.

    Raises:
        SourceError: a file is missing; the message names it.
        UnsupportedFormat: the weights or the tokenizer are in formats that are not read.
    """
    if not (folder / "config.json").is_file():
        raise SourceError(f"{str(folder)!r} has no config.json: give the folder of a model, or a .gguf file")
    weight_files(folder)
    if (folder / "tokenizer.json").is_file():
        return
    if (folder / "tokenizer.model").is_file():
        raise UnsupportedFormat(
            f"{str(folder)!r} has only a SentencePiece tokenizer.model; a tokenizer.json is needed: save the "
            f"tokenizer with a recent transformers release (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    raise SourceError(f"{str(folder)!r} has no tokenizer.json: copy the tokenizer's files beside the weights")


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder: the shards that the index names, or all there are.

    Raises:
        SourceError: there are no weights, or a shard is missing.
        UnsupportedFormat: there are only pickled weights, which are never loaded.
    """
    index = folder / _INDEX
    if index.is_file():
        return _indexed_shards(folder, index)
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UnsupportedFormat(
            f"{str(folder)!r} holds only pickled weights ({', '.join(pickles[:3])}), which are never loaded because "
            f"unpickling can run any code: use a repository with .safetensors files, or convert them with transformers"
        )
    raise SourceError(f"{str(folder)!r} has no .safetensors files: only safetensors and GGUF weights are read")


def read_json_object(path: Path) -> dict[str, object]:
    """Read a JSON file that must hold an object.

    Raises:
        SourceError: the file cannot be read, is no JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{str(path)!r} is not valid JSON ({error}): fetch the file again") from error
    if not isinstance(value, dict):
        raise SourceError(f"{str(path)!r} holds a JSON {type(value).__name__}; an object is expected")
    return cast("dict[str, object]", value)


def _indexed_shards(folder: Path, index: Path) -> list[Path]:
    mapping = read_json_object(index).get("weight_map")
    if not isinstance(mapping, Mapping) or not mapping:
        raise SourceError(f"{str(index)!r} has no weight_map from tensors to files: fetch the file again")
    names = sorted({str(name) for name in cast("Mapping[str, object]", mapping).values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise SourceError(f"{str(index)!r} names {outside[0]!r}; shards must lie in the model's own folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise SourceError(
            f"{str(folder)!r} lacks {len(missing)} of {len(names)} weight files, first {missing[0]!r}: "
            f"finish the download"
        )
    return [folder / name for name in names]
