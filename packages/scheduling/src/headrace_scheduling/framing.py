"""Payloads on a byte stream: each is preceded by its length."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("!Q")


def frame(payload: bytes) -> bytes:
    """Return a payload with its length before it."""
    return _LENGTH.pack(len(payload)) + payload


class Unframer:
    """Cuts what was read from a stream into payloads, however the reads fall."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes and return the payloads that they complete."""
        pending = self._pending
        pending += data
        payloads: list[bytes] = []
        begin = 0
        while begin + _LENGTH.size <= len(pending):
            (length,) = _LENGTH.unpack_from(pending, begin)
            end = begin + _LENGTH.size + length
            if end > len(pending):
                break
            payloads.append(bytes(pending[begin + _LENGTH.size : end]))
            begin = end
        del pending[:begin]
        return payloads
