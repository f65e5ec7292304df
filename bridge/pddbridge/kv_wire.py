"""The bytes of frames and replies, and every check that stands between the network and an allocation. ``bridge/README.md`` is its text.

All integers are little endian. Every message starts with an 8-byte prefix (magic, version, kind); the kind decides the header's size;
every header ends with a CRC32C of the header bytes before it. Handshake messages are in :mod:`pddbridge.kv_handshake`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import cached_property
from typing import Final

import numpy as np
from crc32c import crc32c

from pddbridge.codecs import CODECS, CodecError, CodecId, encode_frame
from pddbridge.engine import KVBlock
from pddbridge.kv_block import check_block, locate_plane
from pddbridge.kv_coverage import Cells
from pddbridge.kv_spec import HeadRange, KVGroup, KVPlane, KVSpec, LayerRange, TokenRange

MAGIC: Final = b"PDDK"
FORMAT_VERSION: Final = 1
# Every receiver takes the first; what it takes beyond, up to the second, is in its welcome.
MAX_PAYLOAD_BYTES: Final = 1 << 20
LARGEST_PAYLOAD_BYTES: Final = 4 << 20
# Codes are the wire's own; names are KV_DTYPES'.
DTYPE_CODES: Final = {"float32": 1, "bfloat16": 2, "float16": 3, "float8_e4m3fn": 4, "float8_e5m2": 5, "int8": 6}

PREFIX: Final = struct.Struct("<4sHH")
# transfer_id, epoch, sequence, group, plane, layers, tokens, heads, codec, dtype, reserved, payload_crc, payload_bytes
_FRAME: Final = struct.Struct("<4sHHQQQHH6IBBHIQ")
# transfer_id, epoch, sequence, reason
_REPLY: Final = struct.Struct("<4sHHQQQI")
_CRC: Final = struct.Struct("<I")
FRAME_HEADER_BYTES: Final = _FRAME.size + _CRC.size
REPLY_BYTES: Final = _REPLY.size + _CRC.size
_U32: Final = 1 << 32
_SAMPLED_ABOVE_BYTES: Final = 1 << 16
_SAMPLE_STRIDE: Final = 16381


class Kind(IntEnum):
    """What a message is; 16 bits on the wire."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    FRAME = 16
    ACK = 17
    NACK = 18
    ASK = 19
    HAVE = 20
    STOP = 21
    PING = 22
    PONG = 23


class NackReason(IntEnum):
    """Why a transfer is dead for its sender; 0 in an ACK."""

    UNKNOWN = 1
    FENCED = 2
    EPOCH = 3
    REFUSED = 4
    FAILED = 5


class WireFault(Enum):
    """What a :class:`WireError` is about."""

    TRUNCATED = "truncated"
    MAGIC = "magic"
    VERSION = "version"
    KIND = "kind"
    CHECKSUM = "checksum"
    RESERVED = "reserved"
    CODEC = "codec"
    DTYPE = "dtype"
    PLANE = "plane"
    RANGE = "range"
    SIZE = "size"
    BODY = "body"


class WireError(Exception):
    """Bytes from a peer that break the format or what was negotiated. The connection they came from cannot be trusted any more."""

    def __init__(self, fault: WireFault, message: str) -> None:
        super().__init__(f"{fault.value}: {message}")
        self.fault = fault
        self.message = message


@dataclass(frozen=True)
class FrameHeader:
    """One plane of one group for absolute ranges. ``epoch`` is the receiver's; ``sequence`` is the sender's, echoed in the reply."""

    transfer_id: int
    epoch: int
    sequence: int
    group: int
    plane: int
    layers: LayerRange
    tokens: TokenRange
    heads: HeadRange
    codec: CodecId
    dtype: str
    payload_crc: int
    payload_bytes: int

    @property
    def rectangle(self) -> tuple[int, int, LayerRange, TokenRange, HeadRange]:
        """What the frame covers: two frames of a transfer with the same rectangle carry the same KV."""
        return self.group, self.plane, self.layers, self.tokens, self.heads

    @cached_property
    def cells(self) -> Cells:
        """``rectangle`` in integers, which are looked up in no time."""
        layers, tokens, heads = self.layers, self.tokens, self.heads
        return self.group, self.plane, layers.start, layers.stop, tokens.start, tokens.stop, heads.start, heads.stop


@dataclass(frozen=True)
class Reply:
    """ACK (``reason`` None): the frame ``sequence`` is placed and checked. NACK: its transfer is dead."""

    transfer_id: int
    epoch: int
    sequence: int
    reason: NackReason | None


def payload_view(values: np.ndarray) -> memoryview:
    """The bytes of C-contiguous ``values``, without a copy. Writable if ``values`` is."""
    if not values.flags.c_contiguous:
        raise ValueError("payload_view: values must be C-contiguous")
    return values.reshape(-1).view(np.uint8).data


def sampled_crc32c(payload: memoryview) -> int:
    """CRC32C of a payload of up to 64 KiB, of every 16,381st byte of a larger one, from its last backwards: for payloads that no wire
    carries. It finds memory that holds another frame, or part of one, at a hundredth of the price; a prime stride meets every place of a
    power-of-two row.
    """
    if len(payload) <= _SAMPLED_ABOVE_BYTES:
        return crc32c(payload)
    return crc32c(np.frombuffer(payload, np.uint8)[::-_SAMPLE_STRIDE].tobytes())


def frame_of(
    spec: KVSpec,
    transfer_id: int,
    epoch: int,
    sequence: int,
    block: KVBlock,
    checksum: Callable[[memoryview], int] = crc32c,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> FrameHeader:
    """The header of a raw frame that carries ``block``. Raises ValueError if the block is malformed, empty or too large for one frame."""
    group, plane = check_block(spec, block)
    if not 0 < block.values.nbytes <= max_bytes:
        raise ValueError(f"frame_of: a frame carries 1 to {max_bytes} bytes, the block has {block.values.nbytes}")
    return FrameHeader(
        transfer_id,
        epoch,
        sequence,
        spec.groups.index(group),
        plane,
        block.layers,
        block.tokens,
        block.heads,
        CodecId.RAW,
        spec.dtype_of(group.planes[plane]),
        checksum(payload_view(block.values)),
        block.values.nbytes,
    )


def encode_frame_header(header: FrameHeader) -> bytes:
    """``FRAME_HEADER_BYTES`` bytes; the payload follows. Raises ValueError if a field does not fit."""
    ranges = (header.layers, header.tokens, header.heads)
    try:
        packed = _FRAME.pack(
            MAGIC,
            FORMAT_VERSION,
            Kind.FRAME,
            header.transfer_id,
            header.epoch,
            header.sequence,
            header.group,
            header.plane,
            *(end for r in ranges for end in (r.start, r.stop)),
            header.codec,
            DTYPE_CODES[header.dtype],
            0,
            header.payload_crc,
            header.payload_bytes,
        )
    except struct.error as error:
        raise ValueError(f"encode_frame_header: {error}: {header}") from error
    return packed + _CRC.pack(crc32c(packed))


def decode_frame_header(
    data: bytes | bytearray | memoryview,
    spec: KVSpec,
    codecs: Collection[CodecId] = frozenset({CodecId.RAW}),
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> FrameHeader:
    """Read a frame header and check every field against ``spec`` and the ``codecs`` that are taken. Raises WireError. Nothing is allocated
    from its fields.
    """
    _, fields = checked_header(data, _FRAME, FRAME_HEADER_BYTES, (Kind.FRAME,))
    transfer_id, epoch, sequence, group_index, plane_index, l0, l1, t0, t1, h0, h1, codec, dtype, reserved, crc, size = fields
    if reserved:
        raise WireError(WireFault.RESERVED, f"reserved bits are {reserved:#x}, must be 0")
    if codec not in codecs:
        raise WireError(WireFault.CODEC, f"given {codec}, allowed {sorted(codecs)}")
    group, plane = _plane_at(spec, group_index, plane_index)
    negotiated = spec.dtype_of(plane)
    if dtype != DTYPE_CODES[negotiated]:
        raise WireError(WireFault.DTYPE, f"given code {dtype}, negotiated {DTYPE_CODES[negotiated]} ({negotiated})")
    for what, start, stop, low, high in (
        ("layers", l0, l1, group.first_layer, group.first_layer + group.num_layers),
        ("tokens", t0, t1, 0, _U32 - 1),
        ("heads", h0, h1, 0, plane.num_heads),
    ):
        if not low <= start < stop <= high:
            raise WireError(WireFault.RANGE, f"{what}: given [{start}, {stop}), must be non-empty and within [{low}, {high})")
    want = (l1 - l0) * (t1 - t0) * (h1 - h0) * plane.head_dim * spec.np_dtype_of(plane).itemsize
    if want > max_bytes:
        raise WireError(WireFault.SIZE, f"values of {want} bytes, at most {max_bytes} are allowed")
    if codec != CodecId.RAW or size != want:
        bounds = CODECS[CodecId(codec)].size_bounds((l1 - l0, t1 - t0, h1 - h0, plane.head_dim), spec.np_dtype_of(plane))
        if size not in bounds:
            raise WireError(WireFault.SIZE, f"payload of {size} bytes, ranges and codec say {bounds.smallest} to {bounds.largest}")
    ranges = (LayerRange(l0, l1), TokenRange(t0, t1), HeadRange(h0, h1))
    return FrameHeader(transfer_id, epoch, sequence, group_index, plane_index, *ranges, CodecId(codec), negotiated, crc, size)


def empty_values(header: FrameHeader, spec: KVSpec, allocate: Callable[[int], np.ndarray] | None = None) -> np.ndarray:
    """Uninitialised values [layers, tokens, heads, dim] to receive the payload of a checked ``header`` into.

    ``allocate`` gives uint8 [bytes]; None: fresh memory.
    """
    _, plane = _plane_at(spec, header.group, header.plane)
    shape, dtype = (len(header.layers), len(header.tokens), len(header.heads), plane.head_dim), spec.np_dtype_of(plane)
    if allocate is None:
        return np.empty(shape, dtype)
    return allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def block_of(header: FrameHeader, spec: KVSpec, values: np.ndarray, checksum: Callable[[memoryview], int] = crc32c) -> KVBlock:
    """The block that a frame carried. Raises WireError if the payload's checksum is wrong."""
    check_payload(header, payload_view(values), checksum)
    _, plane = _plane_at(spec, header.group, header.plane)
    locate_plane(spec, plane.name, header.layers)
    return KVBlock(plane.name, header.layers, header.tokens, header.heads, values)


def coded_frame_of(
    spec: KVSpec, transfer_id: int, epoch: int, sequence: int, block: KVBlock, codec: CodecId, max_bytes: int = MAX_PAYLOAD_BYTES
) -> tuple[FrameHeader, bytes | memoryview]:
    """As :func:`frame_of`, with the payload, in ``codec`` where that makes it smaller. Raises ValueError as :func:`frame_of`."""
    header = frame_of(spec, transfer_id, epoch, sequence, block, lambda _: 0, max_bytes)
    used, payload = encode_frame(CODECS[codec], block.values)
    return replace(header, codec=used, payload_crc=crc32c(payload), payload_bytes=len(payload)), payload


def decoded_block_of(header: FrameHeader, spec: KVSpec, payload: bytearray | memoryview, values: np.ndarray) -> KVBlock:
    """As :func:`block_of`, from a coded ``payload`` into ``values`` (of :func:`empty_values`). Raises WireError."""
    check_payload(header, memoryview(payload))
    try:
        CODECS[header.codec].decode_into(payload, values)
    except CodecError as error:
        raise WireError(WireFault.CODEC, str(error)) from error
    return block_of(header, spec, values, checksum=lambda _: header.payload_crc)


def check_payload(header: FrameHeader, payload: memoryview, checksum: Callable[[memoryview], int] = crc32c) -> None:
    """Raises WireError if ``payload`` is not what the sender put the checksum of into ``header``."""
    given = checksum(payload)
    if given != header.payload_crc:
        raise WireError(WireFault.CHECKSUM, f"payload: computed {given:#010x}, the header says {header.payload_crc:#010x}")


def encode_reply(reply: Reply) -> bytes:
    """``REPLY_BYTES`` bytes. Raises ValueError if a field does not fit."""
    kind = Kind.ACK if reply.reason is None else Kind.NACK
    try:
        packed = _REPLY.pack(MAGIC, FORMAT_VERSION, kind, reply.transfer_id, reply.epoch, reply.sequence, reply.reason or 0)
    except struct.error as error:
        raise ValueError(f"encode_reply: {error}: {reply}") from error
    return packed + _CRC.pack(crc32c(packed))


def decode_reply(data: bytes | bytearray | memoryview) -> Reply:
    """Read an ACK or NACK. Raises WireError."""
    kind, (transfer_id, epoch, sequence, reason) = checked_header(data, _REPLY, REPLY_BYTES, (Kind.ACK, Kind.NACK))
    allowed = (0,) if kind == Kind.ACK else tuple(NackReason)
    if reason not in allowed:
        raise WireError(WireFault.RANGE, f"reason: given {reason}, allowed {[int(r) for r in allowed]}")
    return Reply(transfer_id, epoch, sequence, NackReason(reason) if reason else None)


def check_prefix(data: bytes | bytearray | memoryview, kinds: tuple[Kind, ...]) -> Kind:
    """The kind of the message that starts with ``data``. Raises WireError for a foreign magic or version or a kind not in ``kinds``."""
    if len(data) < PREFIX.size:
        raise WireError(WireFault.TRUNCATED, f"{len(data)} bytes, a prefix has {PREFIX.size}")
    magic, version, kind = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise WireError(WireFault.MAGIC, f"given {magic.hex()}, must be {MAGIC.hex()}")
    if version != FORMAT_VERSION:
        raise WireError(WireFault.VERSION, f"given {version}, must be {FORMAT_VERSION}")
    if kind not in kinds:
        raise WireError(WireFault.KIND, f"given {kind}, allowed here {[k.name for k in kinds]}")
    return Kind(kind)


def checked_header(
    data: bytes | bytearray | memoryview, layout: struct.Struct, size: int, kinds: tuple[Kind, ...]
) -> tuple[Kind, tuple[int, ...]]:
    """Kind and the fields after the prefix of a header laid out as ``layout`` and ending in its CRC32C; ``size`` is that of both.

    Raises WireError unless size, prefix and checksum are right.
    """
    if len(data) != size:
        raise WireError(WireFault.TRUNCATED, f"{len(data)} bytes, the header has {size}")
    kind = check_prefix(data, kinds)
    (stated,) = _CRC.unpack_from(data, layout.size)
    given = crc32c(memoryview(data)[: layout.size])
    if given != stated:
        raise WireError(WireFault.CHECKSUM, f"header: computed {given:#010x}, stated {stated:#010x}")
    return kind, layout.unpack_from(data)[3:]


def _plane_at(spec: KVSpec, group: int, plane: int) -> tuple[KVGroup, KVPlane]:
    if group >= len(spec.groups) or plane >= len(spec.groups[group].planes):
        raise WireError(
            WireFault.PLANE, f"group {group} plane {plane}: the spec has {[len(g.planes) for g in spec.groups]} planes per group"
        )
    return spec.groups[group], spec.groups[group].planes[plane]
