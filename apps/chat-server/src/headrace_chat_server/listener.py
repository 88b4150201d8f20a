"""The listening socket, bound before anything slow happens."""

import errno
import socket

from headrace_chat_server.errors import AddressUnusable

_BACKLOG = 1024


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


def url_of(listener: socket.socket) -> str:
    """Tell the URL under which this machine reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    if host in {"0.0.0.0", "::"}:  # noqa: S104  -- compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken: stop what listens there, or pass another --port (0 picks a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is not allowed for this user: pass a --port of at least 1024"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: pass one that is to --host"
    return f"cannot listen on port {port} of {host}: {error.strerror}"
