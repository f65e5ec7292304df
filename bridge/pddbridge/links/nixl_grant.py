"""What a receiver of the NIXL link tells a sender after the handshake: where and how to write. Little endian, CRC32C last."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from pddbridge.kv_wire import WireError, WireFault
from pddbridge.links import tcp_io
from pddbridge.links.nixl_agent import TAG_BYTES
from pddbridge.links.slots import MAX_SLOTS

_HEADER: Final = struct.Struct(f"<QI{TAG_BYTES}sI")  # address, num_slots, tag, bytes of metadata
_CRC: Final = struct.Struct("<I")
_MAX_METADATA_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Grant:
    """``address`` of ``num_slots`` slots in the receiver; ``tag``: what its messages start with; ``metadata``: of its agent."""

    address: int
    num_slots: int
    tag: bytes
    metadata: bytes


async def send_grant(sock: socket.socket, grant: Grant) -> None:
    """Raises OSError."""
    body = _HEADER.pack(grant.address, grant.num_slots, grant.tag, len(grant.metadata)) + grant.metadata
    await tcp_io.send(sock, body + _CRC.pack(crc32c(body)), memoryview(b""))


async def receive_grant(sock: socket.socket) -> Grant:
    """Raises WireError or OSError."""
    header = await tcp_io.receive(sock, _HEADER.size)
    address, num_slots, tag, metadata_bytes = _HEADER.unpack(header)
    if not (0 < num_slots <= MAX_SLOTS and metadata_bytes <= _MAX_METADATA_BYTES):
        raise WireError(WireFault.SIZE, f"grant of {num_slots} slots with {metadata_bytes} bytes of metadata")
    rest = await tcp_io.receive(sock, metadata_bytes + _CRC.size)
    metadata = bytes(rest[:metadata_bytes])
    if (given := crc32c(metadata, crc32c(header))) != (stated := _CRC.unpack_from(rest, metadata_bytes)[0]):
        raise WireError(WireFault.CHECKSUM, f"grant: computed {given:#010x}, stated {stated:#010x}")
    return Grant(address, num_slots, tag, metadata)
