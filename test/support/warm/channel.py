"""Messages and file descriptors over a Unix socket between a process and its fork server."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

HEADER = struct.Struct("!Q")
MOST = 250
"""File descriptors that one message can carry; the kernel's limit is 253."""


def send(channel: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message and descriptors."""
    socket.send_fds(channel, [HEADER.pack(len(message))], descriptors)
    # Sending nothing fails, too, when the other end has closed, as it may have done on seeing the header.
    if message:
        channel.sendall(message)


def receive(channel: socket.socket) -> tuple[bytes, list[int]] | None:
    """A message and its descriptors; None when the other end is closed."""
    header, descriptors, _, _ = socket.recv_fds(channel, HEADER.size, MOST)
    if not header:
        return None
    (size,) = HEADER.unpack(header + _exactly(channel, HEADER.size - len(header)))
    return _exactly(channel, size), descriptors


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            raise EOFError("the other end of the channel closed in the middle of a message")
        data += part
    return bytes(data)
