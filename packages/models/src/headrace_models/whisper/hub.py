"""Snapshots of Whisper models on a Hugging Face hub. Unlike text models', they may carry no tokenizer."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from headrace_models.errors import DownloadError, SourceError

__all__ = ["fetch_whisper_snapshot"]


def fetch_whisper_snapshot(
    repo_id: str,
    *,
    files: Sequence[str],
    revision: str | None = None,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
    download: bool = True,
    progress: bool = False,
) -> Path:
    """Return the folder of a model's snapshot, downloading what the hub cache lacks.

    A snapshot in the cache that has weights is used without a request.

    Args:
        repo_id: `organisation/name`.
        files: patterns of the files that are fetched.
        revision: branch, tag or commit; None is the main branch.
        cache_dir: the hub cache; None is huggingface_hub's own.
        endpoint: address of the hub; None is huggingface_hub's own.
        download: False accepts only what the cache already holds.
        progress: show progress bars on standard error.

    Raises:
        SourceError: no such model, no access to it, or it is not cached and `download` is False.
        DownloadError: the hub cannot be reached or broke off.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    fetch: Callable[..., str] = partial(
        snapshot_download,
        repo_id,
        revision=revision,
        cache_dir=cache_dir,
        endpoint=endpoint,
        allow_patterns=list(files),
    )
    try:
        folder = Path(fetch(local_files_only=True))
    except LocalEntryNotFoundError:
        folder = None
    if folder is not None and _has_weights(folder):
        return folder
    if not download:
        raise SourceError(f"model {repo_id!r} is not complete in the hub cache and downloads are off")
    if progress:
        enable_progress_bars()
    else:
        disable_progress_bars()
    return _download(repo_id, revision, fetch)


def _has_weights(folder: Path) -> bool:
    found = [path for pattern in ("*.safetensors", "*.npz", "model.bin") for path in folder.glob(pattern)]
    return (folder / "config.json").is_file() and bool(found)


def _download(repo_id: str, revision: str | None, fetch: Callable[..., str]) -> Path:
    from huggingface_hub import errors

    # The HTTP client behind huggingface_hub changes between its versions; its error base is re-exported here.
    http_error: type[Exception] = errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]
    try:
        return Path(fetch())
    except errors.GatedRepoError as error:
        raise SourceError(
            f"model {repo_id!r} is gated: accept its terms on the hub, then log in with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise SourceError(
            f"the hub has no model {repo_id!r} at revision {revision or 'main'!r}, or it is private: "
            f"check the spelling, or log in with `hf auth login`"
        ) from error
    except (http_error, OSError) as error:
        raise DownloadError(
            f"downloading {repo_id!r} failed: {error}; check the network and run again: what has arrived is kept"
        ) from error
