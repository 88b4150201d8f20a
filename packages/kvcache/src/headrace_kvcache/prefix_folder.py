"""Stored prefixes in a folder, from one run of a program to the next."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from headrace_kvcache.cache_file import load_caches, save_caches
from headrace_kvcache.cache_manifest import FORMAT
from headrace_kvcache.clones import arrays_of
from headrace_kvcache.durable_files import DRAFT_SUFFIX, LOCAL_FILES
from headrace_kvcache.errors import CacheFileError, KVCacheError
from headrace_kvcache.prefix_labels import PrefixLabel, parse_label

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace_kvcache.durable_files import FileSystem
    from headrace_kvcache.prefix_cache import PrefixCache
    from headrace_kvcache.prefix_hit import PrefixView

_logger = getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{40}\.safetensors")
# Prompts can be read off these files.
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
# A younger draft may be one that another program is writing.
_DRAFT_AGE_S = 3600.0
# The order of use, which a restart keeps, is that of the files' times.
_USE_STEP_NS = 10_000_000


@frozen(kw_only=True)
class FolderReport:
    """What became of entries.

    Attributes:
        num_entries: entries now in memory, or now in files.
        num_bytes: their bytes.
        num_written: files written; the others were there already.
        num_skipped: entries without room, or that cannot be stored.
        num_damaged: files that were refused, or could not be written.
        duration_s: how long it took.
    """

    num_entries: int = 0
    num_bytes: int = 0
    num_written: int = 0
    num_skipped: int = 0
    num_damaged: int = 0
    duration_s: float = 0.0


@frozen
class _File:
    path: Path
    num_bytes: int
    used_ns: int


class PrefixFolder:
    """Saves the entries of a prefix cache, and loads those of the same identity again; nothing that fails stops it.

    Each entry is a file of `save_caches` under `PATH/IDENTITY`, named by what it holds, so that an entry that is there
    is not written again. Files of other identities and names are left alone. A file of ours that is not what was
    written is reported, and removed. Folders and files are for their owner alone: prompts can be read off them.

    Args:
        path: of the folder; made with its first entry.
        identity: of everything that makes stored caches right: weights, their representation, tokenizer, scheme.
        max_bytes: about the most bytes of files of this identity, one more while it is written; the least recently used
            give way.
        files: the calls to write with.
    """

    def __init__(self, path: str | Path, *, identity: str, max_bytes: int, files: FileSystem = LOCAL_FILES) -> None:
        self._identity = identity
        self._folder = Path(path) / hashlib.sha256(f"{FORMAT}\0{identity}".encode()).hexdigest()[:16]
        self._max_bytes = max_bytes
        self._files = files
        # Names of files that this program has written or read as a whole.
        self._good: set[str] = set()

    @property
    def folder(self) -> Path:
        """Where the files of this identity are."""
        return self._folder

    # ---- loading -----------------------------------------------------------------------------------------------

    def load(self, cache: PrefixCache) -> FolderReport:
        """Put what is stored into a cache, as much as it has room for: the most recently used, in their order."""
        begun = time.perf_counter()
        chosen: list[_File] = []
        room, num_skipped = min(self._max_bytes, cache.max_bytes) - cache.nbytes, 0
        for file in sorted(self._found(), key=lambda each: each.used_ns, reverse=True):
            if file.num_bytes <= room:
                chosen.append(file)
                room -= file.num_bytes
            else:
                num_skipped += 1
        num_damaged = sum(not self._load(file, cache) for file in reversed(chosen))
        return FolderReport(
            num_entries=len(cache),
            num_bytes=cache.nbytes,
            num_skipped=num_skipped,
            num_damaged=num_damaged,
            duration_s=time.perf_counter() - begun,
        )

    def _load(self, file: _File, cache: PrefixCache) -> bool:
        try:
            saved = load_caches(file.path)
            label = self._label(saved.metadata, file.path.name)
            cache.put(label.tokens, saved.caches, namespace=label.namespace, session_id=label.session_id)
        except (OSError, KVCacheError) as error:
            # No message of these quotes tokens.
            _logger.warning("a stored prompt is not used: %s", error)
            if isinstance(error, KVCacheError):
                self._remove(file.path)
            return False
        self._good.add(file.path.name)
        return True

    def _label(self, metadata: Mapping[str, str], name: str) -> PrefixLabel:
        label = parse_label(metadata)
        if label.identity != self._identity or label.file_name != name:
            raise CacheFileError(f"{name!r} was stored for another model, or under another name", "damaged")
        return label

    # ---- saving ------------------------------------------------------------------------------------------------

    def save(self, cache: PrefixCache) -> FolderReport:
        """Write the entries of a cache that are not there yet, the most recently used first."""
        begun = time.perf_counter()
        try:
            self._folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            _logger.warning("prompts cannot be stored: %s", error)
            return FolderReport(num_damaged=len(cache))
        self._remove_drafts()
        views, num_skipped = self._within_limit(list(cache.views())[::-1])
        labels = [PrefixLabel.of(view, self._identity) for view in views]
        kept = {label.file_name for label in labels}
        now, counts = time.time_ns(), {"written": 0, "entries": 0, "skipped": num_skipped, "damaged": 0}
        for rank, label in enumerate(labels):
            # What is joined for a file goes with it.
            view = views.pop(0)
            try:
                is_new = self._write(view, label)
                used_ns = now - rank * _USE_STEP_NS
                os.utime(self._folder / label.file_name, ns=(used_ns, used_ns))
                counts["entries"] += 1
                if is_new:
                    counts["written"] += 1
                    # Not before: what cannot be written, or a program that ends, must not cost other entries.
                    self._make_room(kept)
            except KVCacheError as error:
                _logger.info("a prompt of %d tokens is not stored: %s", len(view.tokens), error)
                counts["skipped"] += 1
            except OSError as error:
                _logger.warning("a prompt of %d tokens cannot be stored: %s", len(view.tokens), error)
                counts["damaged"] += 1
                if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
                    counts["damaged"] += len(views)
                    break
        # The limit may be lower than it was.
        self._make_room(kept)
        return FolderReport(
            num_entries=counts["entries"],
            num_bytes=sum(file.num_bytes for file in self._found()),
            num_written=counts["written"],
            num_skipped=counts["skipped"],
            num_damaged=counts["damaged"],
            duration_s=time.perf_counter() - begun,
        )

    def _within_limit(self, views: list[PrefixView]) -> tuple[list[PrefixView], int]:
        """Return the first entries that fit together, and how many do not: in files they have no bytes in common."""
        chosen: list[PrefixView] = []
        room = self._max_bytes
        for view in views:
            size = _num_bytes(view)
            if size <= room:
                chosen.append(view)
                room -= size
        return chosen, len(views) - len(chosen)

    def _write(self, view: PrefixView, label: PrefixLabel) -> bool:
        """Write an entry unless a good file of it is there, and return whether it was written."""
        path = self._folder / label.file_name
        if path.name in self._good and path.is_file():
            return False
        save_caches(path, view.caches, metadata=label.to_metadata(), mode=_FILE_MODE, files=self._files)
        self._good.add(path.name)
        return True

    def _make_room(self, kept: set[str]) -> None:
        """Remove the least recently used of other entries until all files are within the limit."""
        found = list(self._found())
        excess = sum(file.num_bytes for file in found) - self._max_bytes
        others = [file for file in found if file.path.name not in kept]
        for file in sorted(others, key=lambda each: each.used_ns):
            if excess <= 0:
                return
            self._remove(file.path)
            excess -= file.num_bytes

    # ---- files -------------------------------------------------------------------------------------------------

    def _found(self) -> Iterator[_File]:
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        about = entry.stat(follow_symlinks=False)
                        yield _File(Path(entry.path), about.st_size, about.st_mtime_ns)
        except FileNotFoundError:
            return
        except OSError as error:
            _logger.warning("stored prompts cannot be listed: %s", error)

    def _remove_drafts(self) -> None:
        """Remove what killed programs have left half written."""
        for draft in self._folder.glob(f".*{DRAFT_SUFFIX}"):
            try:
                if time.time() - draft.stat().st_mtime > _DRAFT_AGE_S:
                    self._files.remove(draft)
            except OSError:
                continue

    def _remove(self, path: Path) -> None:
        self._good.discard(path.name)
        try:
            self._files.remove(path)
        except OSError as error:
            _logger.warning("a stored prompt cannot be removed: %s", error)


def _num_bytes(view: PrefixView) -> int:
    return sum(array.nbytes for array in arrays_of(view.caches))
