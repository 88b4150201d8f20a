"""From a name to a model on this machine: a folder, a GGUF file, a hub id, or a model that an index package carries."""

import re
from pathlib import Path
from typing import Literal

from attrs import frozen

from headrace_models.errors import SourceError
from headrace_models.folder import check_folder
from headrace_models.hub import fetch_snapshot
from headrace_models.index_models import INDEX_MODELS, fetch_index_model

__all__ = ["ModelSource", "resolve"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@frozen(kw_only=True)
class ModelSource:
    """A model's files on this machine.

    Attributes:
        name: what to call the model: the hub id, the short name, or the last part of the path.
        path: the folder, or the GGUF file.
        format: which of the two it is.
    """

    name: str
    path: Path
    format: Literal["folder", "gguf"]


def resolve(
    name: str | Path,
    *,
    cache_dir: Path | None = None,
    hub_cache_dir: Path | None = None,
    endpoint: str | None = None,
    revision: str | None = None,
    download: bool = True,
    progress: bool = False,
) -> ModelSource:
    """Find a model by name, fetching it when it is not on this machine yet.

    Looked for in this order: a path that exists, a short name of `INDEX_MODELS`, a hub id `organisation/name`.

    Args:
        name: path, short name or hub id.
        cache_dir: where index packages are kept; None is the user's cache folder for headrace.
        hub_cache_dir: the hub cache; None is huggingface_hub's own.
        endpoint: address of the hub; None is huggingface_hub's own.
        revision: branch, tag or commit on the hub.
        download: False uses only what is on this machine.
        progress: show progress on standard error.

    Raises:
        SourceError: the name leads to no model, or the model is incomplete.
        UnsupportedFormat: the model has no weights in a format that is read here.
        DownloadError: fetching failed.
        ChecksumMismatch: a fetched file is not the expected one.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _file_source(path)
    if path.is_dir():
        return _folder_source(path)
    text = str(name)
    if text in INDEX_MODELS:
        file = fetch_index_model(
            INDEX_MODELS[text], cache_dir=cache_dir or _user_cache_dir(), download=download, progress=progress
        )
        return ModelSource(name=text, path=file, format="gguf")
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        folder = fetch_snapshot(
            text,
            revision=revision,
            cache_dir=hub_cache_dir,
            endpoint=endpoint,
            download=download,
            progress=progress,
        )
        return ModelSource(name=text, path=folder, format="folder")
    raise SourceError(
        f"no model {text!r}: give a model folder or a .gguf file that exists, a hub id like 'organisation/name', "
        f"or one of {', '.join(sorted(INDEX_MODELS))}"
    )


def _user_cache_dir() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("headrace") / "models"


def _file_source(path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise SourceError(f"{str(path)!r} is a file but no .gguf: give a model folder or a .gguf file")
    return ModelSource(name=path.stem, path=path.resolve(), format="gguf")


def _folder_source(path: Path) -> ModelSource:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _file_source(ggufs[0])
        if ggufs:
            raise SourceError(f"{str(path)!r} holds {len(ggufs)} .gguf files: name one, for example {str(ggufs[0])!r}")
    check_folder(path)
    folder = path.resolve()
    return ModelSource(name=folder.name, path=folder, format="folder")
