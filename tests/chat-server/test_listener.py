"""Laws of the listening socket."""

import socket

import pytest

from headrace_chat_server.errors import AddressUnusable
from headrace_chat_server.listener import bind, url_of


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_port_0_takes_a_free_port_that_the_url_names(host):
    """The socket listens at once: the kernel accepts connections before any server runs."""
    with bind(host, 0) as listener:
        host_part, _, port = url_of(listener).removeprefix("http://").rpartition(":")
        with socket.create_connection((host_part.strip("[]"), int(port)), timeout=5):
            pass


def test_a_taken_port_is_refused_and_nothing_stays_open():
    """Two servers never share a port."""
    with bind("127.0.0.1", 0) as first, pytest.raises(AddressUnusable, match="is taken"):
        bind("127.0.0.1", first.getsockname()[1])


def test_children_do_not_inherit_the_socket():
    """An engine process that outlives a crash must not hold the port."""
    with bind("127.0.0.1", 0) as listener:
        assert not listener.get_inheritable()


def test_the_url_of_any_address_is_reachable_from_here():
    """0.0.0.0 is no address to connect to; the URL names loopback instead."""
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")
