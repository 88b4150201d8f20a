"""The body of a request: read, parsed, and the fields in it that nobody knows."""

import asyncio
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request

from headrace_http_api.errors import ClientDisconnected, InvalidRequest
from headrace_http_api.json_body import field_path, parse_object
from headrace_http_api.validation import unknown_names

__all__ = ["IGNORED_HEADER", "ignored_header", "read_body", "read_optional_body"]

# Parsing more takes long enough to delay the streams of others: a worker thread does it.
LONG_BODY_BYTES = 64 * 1024

IGNORED_HEADER = "x-headrace-ignored"
MAX_IGNORED_NAMES = 32


async def read_body(http: Request) -> tuple[dict[str, Any], int]:
    """Return the parsed body and its size in bytes; the body itself is not kept.

    Raises:
        InvalidRequest: it is no JSON object as `parse_object` reads them.
        ClientDisconnected: the client left before its end.
    """
    return await _parse(await _read(http))


async def read_optional_body(http: Request) -> dict[str, Any]:
    """Return the parsed body; empty if there is none.

    Raises:
        As `read_body`.
    """
    body = await _read(http)
    return (await _parse(body))[0] if body else {}


async def _read(http: Request) -> bytes:
    try:
        return b"".join([chunk async for chunk in http.stream()])
    except ClientDisconnect:
        raise ClientDisconnected from None


async def _parse(body: bytes) -> tuple[dict[str, Any], int]:
    if len(body) > LONG_BODY_BYTES:
        return await asyncio.to_thread(parse_object, body), len(body)
    return parse_object(body), len(body)


def ignored_header(
    body: Mapping[str, Any], kind: type, accepted: AbstractSet[str], *, is_strict: bool
) -> dict[str, str]:
    """Build the header that names the fields of a body without effect; empty if there are none.

    Args:
        body: as parsed.
        kind: the request class whose fields are known.
        accepted: further names that are no news to tell.
        is_strict: refuse the first such field instead.

    Raises:
        InvalidRequest: names it.
    """
    names = unknown_names(body, kind, accepted)[:MAX_IGNORED_NAMES]
    if names and is_strict:
        path = field_path("", names[0])
        raise InvalidRequest(
            f"{path} is no field that this server knows, and it refuses such fields; leave it out",
            param=path,
            code="unknown_parameter",
        )
    return {IGNORED_HEADER: ", ".join(map(_header_name, names))} if names else {}


def _header_name(name: str) -> str:
    # Percent-encoded and cut, because names come from the client and headers carry neither line ends nor much text. A
    # header may not end in a space either, which an empty name at the end of the list would make it do.
    return quote(name[:64], safe="")[:64] or '""'
