"""The listening socket, bound before anything slow happens: an address, or a path for this machine's users."""

import errno
import os
import socket
import stat
from pathlib import Path

from headrace_transcription_server.errors import AddressUnusable

__all__ = ["bind", "bind_unix", "remove_path", "url_of"]

_BACKLOG = 1024
_UNIX = "unix:"
_OWNER_ONLY = 0o600


def bind(host: str, port: int) -> socket.socket:
    """Bind and listen; the caller owns the socket. Port 0 takes a free one.

    Raises:
        AddressUnusable: when the address is taken, forbidden or unknown.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise AddressUnusable(f"host {host!r} is unknown ({error.strerror}): pass an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressUnusable(_explain(error, host, port)) from None
    listener.setblocking(False)
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Bind and listen on a path that only this user may connect to; a socket that nobody serves is replaced.

    Raises:
        AddressUnusable: when something else is there, or the path cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        # Nobody may connect between binding and the change of its mode.
        former = os.umask(0o777 & ~_OWNER_ONLY)
        try:
            listener.bind(str(path))
        finally:
            os.umask(former)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise AddressUnusable(f"cannot listen on {str(path)!r} ({reason}): pass another path to --unix") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Tell the URL under which this machine reaches a listening socket."""
    if listener.family == socket.AF_UNIX:
        return f"{_UNIX}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    if host in {"0.0.0.0", "::"}:  # noqa: S104  -- compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def remove_path(url: str) -> None:
    """Remove the path of a Unix socket that is served no more; other addresses leave nothing behind."""
    if url.startswith(_UNIX):
        Path(url.removeprefix(_UNIX)).unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise FileExistsError(errno.EADDRINUSE, "another server listens there")
    path.unlink()


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken: stop what listens there, or pass another --port (0 picks a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is not allowed for this user: pass a --port of at least 1024"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: pass one that is to --host"
    return f"cannot listen on port {port} of {host}: {error.strerror}"
