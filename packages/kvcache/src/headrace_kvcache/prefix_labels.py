"""What the file of a stored prefix says of it. Free of arrays."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Self, cast

from attrs import asdict, frozen

from headrace_kvcache.errors import CacheFileError
from headrace_kvcache.prefix_namespace import PrefixNamespace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_kvcache.prefix_hit import PrefixView


@frozen
class PrefixLabel:
    """Everything about an entry but its caches.

    Attributes:
        identity: of the model, see `PrefixFolder`.
        namespace: where it serves.
        tokens: what its caches hold.
        session_id: of the `put` that stored it.
    """

    identity: str
    namespace: PrefixNamespace
    tokens: tuple[int, ...]
    session_id: str | None = None

    @classmethod
    def of(cls, view: PrefixView, identity: str) -> Self:
        """Return the label of an entry."""
        return cls(identity, view.namespace, view.tokens, view.session_id)

    @property
    def file_name(self) -> str:
        """The name of its file: a digest of namespace and tokens."""
        found = hashlib.sha256(f"{_namespace_text(self.namespace)}\0{_tokens_text(self.tokens)}".encode())
        return f"{found.hexdigest()[:40]}.safetensors"

    def to_metadata(self) -> dict[str, str]:
        """Return it as metadata of a cache file."""
        session = {} if self.session_id is None else {"session": self.session_id}
        return {
            "identity": self.identity,
            "namespace": _namespace_text(self.namespace),
            "tokens": _tokens_text(self.tokens),
            **session,
        }


def parse_label(metadata: Mapping[str, str]) -> PrefixLabel:
    """Read the label of a file.

    Raises:
        CacheFileError: it has none.
    """
    try:
        namespace = cast("dict[str, object]", json.loads(metadata["namespace"]))
        namespace["adapters"] = tuple(
            (name, scale) for name, scale in cast("list[list[object]]", namespace["adapters"])
        )
        tokens = tuple(map(int, metadata["tokens"].split()))
        return PrefixLabel(
            metadata["identity"],
            PrefixNamespace(**namespace),  # pyright: ignore[reportArgumentType]
            tokens,
            metadata.get("session"),
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        raise CacheFileError("it is no stored prompt", "foreign") from None


def _namespace_text(namespace: PrefixNamespace) -> str:
    return json.dumps(asdict(namespace), sort_keys=True, separators=(",", ":"))


def _tokens_text(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens))
