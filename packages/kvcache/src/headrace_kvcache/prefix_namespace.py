"""What must agree besides the tokens for a stored prefix to serve. Free of arrays."""

from __future__ import annotations

from attrs import frozen


@frozen
class PrefixNamespace:
    """One composed value for prefetch, take, put and snapshot; no namespace at all (None) means: do not cache.

    Hashable and picklable.

    Attributes:
        scheme_key: `KVScheme.key`, which names everything that changes stored bytes or numbers.
        layout: how the bytes lie, where several layouts exist.
        adapters: content digests of the mounted adapters with their scales, in order: content, not names, because
            an adapter can be mounted again under its name with other weights.
        media: digest of all media and of every token rendered before them, because equal placeholder ids may stand for
            different media; None for text alone.
        tenant: whose prefixes these are: a hit is answered sooner, which would tell one tenant what another sent.
    """

    scheme_key: str
    layout: str = ""
    adapters: tuple[tuple[str, float], ...] = ()
    media: str | None = None
    tenant: str | None = None
