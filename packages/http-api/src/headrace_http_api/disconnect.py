"""Work that ends when its client leaves: ASGI tells it through `receive`, which nothing else reads by then."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Never, TypeVar

from starlette.types import Receive

from headrace_http_api.errors import ClientDisconnected

__all__ = ["run_until", "run_until_disconnect", "wait_for_disconnect"]

T = TypeVar("T")


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it, and wait until it has cleaned up, when the client leaves or the caller is cancelled.

    Args:
        receive: of a request whose body is read to its end.
        work: a coroutine; it owns what it opens.

    Raises:
        ClientDisconnected: the client left first.
    """
    return await run_until(work, wait_for_disconnect(receive))


async def run_until(work: Coroutine[Any, Any, T], *watchers: Coroutine[Any, Any, Never]) -> T:
    """Run `work`, until a watcher raises or the caller is cancelled; then cancel it and wait until it has cleaned up.

    Raises:
        Exception: what the work or the first watcher raised.
    """
    task = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(watcher) for watcher in watchers]
    try:
        await asyncio.wait({task, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            next(watcher for watcher in watching if watcher.done()).result()
        return task.result()
    finally:
        for each in (task, *watching):
            each.cancel()
        await asyncio.gather(task, *watching, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> Never:
    """Wait until the client leaves.

    Raises:
        ClientDisconnected: it did.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnected
