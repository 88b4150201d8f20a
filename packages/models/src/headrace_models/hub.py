"""Snapshots of models on a Hugging Face hub, through huggingface_hub and its cache."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_models.errors import DownloadError, ModelError, SourceError
from headrace_models.folder import check_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["HUB_FILES", "fetch_snapshot"]

HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""What is downloaded: never a pickle, never code."""


def fetch_snapshot(
    repo_id: str,
    *,
    files: "Sequence[str]" = HUB_FILES,
    check: "Callable[[Path], object]" = check_folder,
    revision: str | None = None,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
    download: bool = True,
    progress: bool = False,
) -> Path:
    """Return the folder of a model's snapshot, downloading what the hub cache lacks.

    A complete snapshot in the cache is used without a request. Interrupted downloads are resumed.

    Args:
        repo_id: `organisation/name`.
        files: patterns of the files that are fetched.
        check: raises a `ModelError` for a folder that is not complete.
        revision: branch, tag or commit; None is the main branch.
        cache_dir: the hub cache; None is huggingface_hub's own.
        endpoint: address of the hub; None is huggingface_hub's own.
        download: False accepts only what the cache already holds.
        progress: show progress bars on standard error.

    Raises:
        SourceError: no such model, no access to it, or it is not cached and `download` is False.
        DownloadError: the hub cannot be reached or broke off.
        ModelError: what `check` raised of the fetched folder; by default `UnsupportedFormat` for a model without
            weights in a format that is read here.
    """
    options: dict[str, Any] = {
        "revision": revision,
        "cache_dir": cache_dir,
        "endpoint": endpoint,
        "allow_patterns": list(files),
        "tqdm_class": None if progress else _silent_bar(),
    }
    cached = _cached_snapshot(repo_id, options, check)
    if cached is not None:
        return cached
    if not download:
        raise SourceError(f"model {repo_id!r} is not complete in the hub cache and downloads are off")
    folder = _download(repo_id, options)
    check(folder)
    return folder


def _cached_snapshot(repo_id: str, options: "Mapping[str, Any]", check: "Callable[[Path], object]") -> Path | None:
    """Return a snapshot that needs no network; what an interrupted download left counts as absent."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True, **options))
        check(folder)
    except (LocalEntryNotFoundError, ModelError):
        return None
    return folder


def _download(repo_id: str, options: "Mapping[str, Any]") -> Path:
    from huggingface_hub import errors, snapshot_download

    # The HTTP client behind huggingface_hub changes between its versions; its error base is re-exported here.
    http_error: type[Exception] = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
    try:
        return Path(snapshot_download(repo_id, **options))
    except errors.GatedRepoError as error:
        raise SourceError(
            f"model {repo_id!r} is gated: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise SourceError(
            f"the hub has no model {repo_id!r} at revision {options['revision'] or 'main'!r}, or it is private: "
            f"check the spelling, or log in with `hf auth login`"
        ) from error
    except (http_error, OSError) as error:
        raise DownloadError(
            f"downloading {repo_id!r} failed: {error}; check the network and run again: what has arrived is kept"
        ) from error


def _silent_bar() -> type[Any]:
    from huggingface_hub.utils import tqdm

    class SilentBar(tqdm):  # pyright: ignore[reportUntypedBaseClass]
        """A progress bar that shows nothing, whatever the caller asks for."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return SilentBar
