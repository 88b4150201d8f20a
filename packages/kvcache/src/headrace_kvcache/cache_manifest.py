"""What a cache file says of itself in its metadata, in mlx-lm's layout with a few entries more. Free of arrays.

mlx-lm writes `0.KEY` for the caller's metadata, `1.I` for the class of layer I, and `2.J.0` and `2.J.1` for the path
and kind of each number, text and None that it wrapped into a tensor. Headrace's own entries lie among the caller's,
where mlx-lm's reader passes them by.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from attrs import field, frozen

from headrace_kvcache.errors import CacheFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

ScalarKind: TypeAlias = Literal["scalar", "string", "none"]

FORMAT = 1
"""Version of Headrace's entries; another one is refused."""

DIGEST_CHARACTERS = 64
NO_DIGEST = "0" * DIGEST_CHARACTERS

_RESERVED = "headrace"
_FORMAT, _DIGEST, _POSITIONS = (f"0.{_RESERVED}_{name}" for name in ("format", "sha256", "positions"))
_KINDS: frozenset[str] = frozenset({"scalar", "string", "none"})


@frozen(kw_only=True)
class CacheManifest:
    """What the tensors of a file stand for.

    Attributes:
        classes: name of each layer's cache class.
        scalars: kind of each number, text and None, by its path.
        positions: positions held by caches whose state does not tell it, by path.
        metadata: the caller's own.
        digest: SHA-256 of the file, see `hashed_header`; None in a file that Headrace did not write.
    """

    classes: tuple[str, ...]
    scalars: Mapping[str, ScalarKind]
    positions: Mapping[str, int] = field(factory=dict[str, int])
    metadata: Mapping[str, str] = field(factory=dict[str, str])
    digest: str | None = None

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of a file."""
        found = {f"0.{key}": text for key, text in self.metadata.items()}
        found[_FORMAT] = str(FORMAT)
        found[_DIGEST] = NO_DIGEST if self.digest is None else self.digest
        if self.positions:
            found[_POSITIONS] = json.dumps(self.positions, separators=(",", ":"))
        found |= {f"1.{index}": name for index, name in enumerate(self.classes)}
        # mlx-lm needs something here even if there are no scalars.
        found["2.0"] = ""
        for index, (path, kind) in enumerate(self.scalars.items(), 1):
            found |= {f"2.{index}.0": path, f"2.{index}.1": kind}
        return found


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise unless the caller's metadata can be stored as mlx-lm stores it.

    Raises:
        CacheFileError: a key that is no plain name, or a value that is no text.
    """
    for key, text in metadata.items():
        if type(key) is not str or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", key) or key.startswith(_RESERVED):
            raise CacheFileError(
                f"metadata has the key {key!r}; keys are letters, digits, _ and -, and do not begin with "
                f"{_RESERVED!r} or a digit",
                "unsupported",
            )
        if type(text) is not str:
            raise CacheFileError(f"metadata {key!r} is a {type(text).__name__}; values are texts", "unsupported")


def parse_manifest(metadata: Mapping[str, str]) -> CacheManifest:
    """Read the metadata of a file.

    Raises:
        CacheFileError: it is not that of a cache file, or of another version.
    """
    classes = tuple(_numbered(metadata, "1.{}"))
    if not classes or "2.0" not in metadata:
        raise CacheFileError("its metadata names no cache classes", "foreign")
    digest = metadata.get(_DIGEST)
    if digest is None and _FORMAT in metadata:
        raise CacheFileError("it has no checksum", "damaged")
    if digest is not None and metadata.get(_FORMAT) != str(FORMAT):
        raise CacheFileError(f"it has the format {metadata.get(_FORMAT)!r}; this version reads {FORMAT}", "version")
    paths, kinds = list(_numbered(metadata, "2.{}.0", first=1)), list(_numbered(metadata, "2.{}.1", first=1))
    scalars = dict(zip(paths, kinds, strict=False))
    own = {key: text for key, text in metadata.items() if key.startswith("0.")}
    num_known = len(own) + len(classes) + len(paths) + len(kinds) + 1
    is_whole = len(paths) == len(kinds) == len(scalars) and num_known == len(metadata) and _KINDS.issuperset(kinds)
    if not is_whole:
        raise CacheFileError("its metadata does not fit together", "damaged")
    return CacheManifest(
        classes=classes,
        scalars=cast("dict[str, ScalarKind]", scalars),
        positions=_positions(own.get(_POSITIONS, "{}")) if digest is not None else {},
        metadata={key[2:]: text for key, text in own.items() if not key.startswith(f"0.{_RESERVED}_")},
        digest=digest,
    )


def hashed_header(raw: bytes, digest: str) -> bytes:
    """Return a header as it is hashed: with zeros in the place of the digest, which stands in it once.

    Raises:
        CacheFileError: it does not stand there as Headrace writes it.
    """
    entry = f'"{_DIGEST}":"{digest}"'.encode()
    if len(digest) != DIGEST_CHARACTERS or raw.count(entry) != 1:
        raise CacheFileError("its checksum does not stand where it belongs", "damaged")
    return raw.replace(entry, f'"{_DIGEST}":"{NO_DIGEST}"'.encode())


def with_digest(raw: bytes, digest: str) -> bytes:
    """Return a header with a digest in the place of the zeros."""
    return raw.replace(f'"{_DIGEST}":"{NO_DIGEST}"'.encode(), f'"{_DIGEST}":"{digest}"'.encode())


def _numbered(metadata: Mapping[str, str], form: str, *, first: int = 0) -> list[str]:
    found: list[str] = []
    while (text := metadata.get(form.format(first + len(found)))) is not None:
        found.append(text)
    return found


def _positions(text: str) -> dict[str, int]:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        positions = cast("dict[str, object]", found)
        if all(type(value) is int and 0 <= value < 1 << 31 for value in positions.values()):  # pyright: ignore[reportOperatorIssue]
            return cast("dict[str, int]", positions)
    raise CacheFileError("its numbers of positions cannot be read", "damaged")
