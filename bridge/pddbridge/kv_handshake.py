"""What two processes must agree on before any KV moves, and the JSON messages in which they say so.

A mismatch is refused on both sides, with both values named: the receiver answers ``refuse`` and records the same error itself;
a sender that is welcomed by values other than its own refuses as well.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from crc32c import crc32c

from pddbridge.codecs import CodecId
from pddbridge.kv_spec import KVSpec
from pddbridge.kv_wire import FORMAT_VERSION, LARGEST_PAYLOAD_BYTES, MAGIC, MAX_PAYLOAD_BYTES, Kind, WireError, WireFault, check_prefix

PROTOCOL_VERSION: Final = 2
# Order of a payload's axes and its version: what an exporter converts to and an importer converts from.
WIRE_LAYOUT: Final = "layers,tokens,heads,dim;1"
MAX_BODY_BYTES: Final = 1 << 16
_MAX_TEXT: Final = 4096
# Five texts of this length fit a refuse's body even if every character is escaped to 12 bytes.
_MAX_SHOWN: Final = 1000
_HEADER: Final = struct.Struct("<4sHHII")
_CRC: Final = struct.Struct("<I")
HANDSHAKE_HEADER_BYTES: Final = _HEADER.size + _CRC.size

_KINDS: Final = {"hello": Kind.HELLO, "welcome": Kind.WELCOME, "refuse": Kind.REFUSE}
MessageName = Literal["hello", "welcome", "refuse"]


@dataclass(frozen=True)
class Handshake:
    """One process's side. ``epoch``: drawn anew at every start of the process, 64 bits; ``fingerprint`` as :mod:`pddbridge.fingerprint`;
    ``name``: for errors and logs, and what a receiver that knows its senders knows them by. ``wire_layout`` names and versions the order of
    payloads, however the engine stores its KV.
    """

    protocol_version: int
    fingerprint: str
    kv_spec: KVSpec
    epoch: int
    name: str
    wire_layout: str = WIRE_LAYOUT

    def __post_init__(self) -> None:
        if not 0 <= self.epoch < 1 << 64:
            raise ValueError(f"Handshake.epoch: given {self.epoch}, must fit 64 bits")
        for field in ("fingerprint", "name", "wire_layout"):
            if len(getattr(self, field)) > _MAX_TEXT:
                raise ValueError(f"Handshake.{field}: longer than {_MAX_TEXT} characters")


class HandshakeError(Exception):
    """The two sides differ in ``field``. Trying again cannot help."""

    def __init__(self, field: str, sender: str, sender_value: str, receiver: str, receiver_value: str) -> None:
        self.field = _clip(field)
        self.sender = _clip(sender)
        self.sender_value = _clip(sender_value)
        self.receiver = _clip(receiver)
        self.receiver_value = _clip(receiver_value)
        super().__init__(
            f"{self.field} differs: sender {self.sender!r} has {self.sender_value}, receiver {self.receiver!r} has {self.receiver_value}"
        )


@dataclass(frozen=True)
class Terms:
    """What a hello or a welcome says. ``receiver_epoch``: in a hello, whom the sender means to reach; in a welcome, who answers."""

    name: str
    epoch: int
    receiver_epoch: int
    compared: dict[str, str]


def hello(mine: Handshake, receiver_epoch: int) -> bytes:
    """The sender's first message."""
    return encode_message("hello", _terms(mine, receiver_epoch))


def welcome(mine: Handshake, codecs: Collection[CodecId] = (CodecId.RAW,), max_payload_bytes: int | None = None) -> bytes:
    """The receiver's answer to an acceptable hello. ``codecs``: those it takes. ``max_payload_bytes``: so large a block in one frame; None:
    not said.
    """
    taken = {"codecs": ",".join(CodecId(c).name for c in sorted(codecs))}
    if max_payload_bytes is not None:
        taken["max_payload_bytes"] = str(max_payload_bytes)
    return encode_message("welcome", {**_terms(mine, mine.epoch), **taken})


def codecs_of(body: dict[str, str]) -> frozenset[CodecId]:
    """The codecs that the receiver who sent a welcome takes, as far as they are known here; raw ones at least."""
    return frozenset({CodecId.RAW, *(CodecId[name] for name in body.get("codecs", "").split(",") if name in CodecId.__members__)})


def payload_bytes_of(body: dict[str, str]) -> int:
    """How large a block the receiver who sent a welcome takes in one frame, as far as frames are made so large here. Raises WireError for
    anything but a number of at least ``MAX_PAYLOAD_BYTES``, which is what those take that say nothing.
    """
    given = _number64("max_payload_bytes", body.get("max_payload_bytes", str(MAX_PAYLOAD_BYTES)))
    if given < MAX_PAYLOAD_BYTES:
        raise WireError(WireFault.BODY, f"max_payload_bytes: given {given}, must be at least {MAX_PAYLOAD_BYTES}")
    return min(given, LARGEST_PAYLOAD_BYTES)


def refuse(error: HandshakeError) -> bytes:
    """The receiver's answer to any other hello."""
    names = ("field", "sender", "sender_value", "receiver", "receiver_value")
    return encode_message("refuse", {name: getattr(error, name) for name in names})


def check_hello(body: dict[str, str], mine: Handshake, peers: Collection[str] | None = None) -> Terms:
    """Receiver's side. Raises HandshakeError where ``body`` differs from ``mine`` and for a sender that is not among ``peers``, the names
    that the topology knows (None: anyone); WireError if it is no hello.
    """
    theirs = parse_terms(body)
    for field, value in _compared(mine).items():
        if theirs.compared[field] != value:
            raise HandshakeError(field, theirs.name, theirs.compared[field], mine.name, value)
    if theirs.receiver_epoch != mine.epoch:
        raise HandshakeError("receiver_epoch", theirs.name, str(theirs.receiver_epoch), mine.name, str(mine.epoch))
    if peers is not None and theirs.name not in peers:
        raise HandshakeError("name", theirs.name, theirs.name, mine.name, f"only {sorted(peers)}")
    return theirs


def check_welcome(body: dict[str, str], mine: Handshake, receiver_epoch: int) -> Terms:
    """Sender's side. Raises HandshakeError where ``body`` differs from ``mine``, WireError if it is no welcome."""
    theirs = parse_terms(body)
    for field, value in _compared(mine).items():
        if theirs.compared[field] != value:
            raise HandshakeError(field, mine.name, value, theirs.name, theirs.compared[field])
    if theirs.receiver_epoch != receiver_epoch:
        raise HandshakeError("receiver_epoch", mine.name, str(receiver_epoch), theirs.name, str(theirs.receiver_epoch))
    return theirs


def parse_terms(body: dict[str, str]) -> Terms:
    """Raises WireError for a missing field or an epoch that is no 64-bit number."""
    missing = sorted({"name", "epoch", "receiver_epoch", *_COMPARED} - body.keys())
    if missing:
        raise WireError(WireFault.BODY, f"handshake lacks {missing}")
    epoch, receiver_epoch = (_number64(field, body[field]) for field in ("epoch", "receiver_epoch"))
    return Terms(body["name"], epoch, receiver_epoch, {field: body[field] for field in _COMPARED})


def parse_refuse(body: dict[str, str]) -> HandshakeError:
    """Raises WireError for a missing field."""
    names = ("field", "sender", "sender_value", "receiver", "receiver_value")
    if missing := sorted(set(names) - body.keys()):
        raise WireError(WireFault.BODY, f"refuse lacks {missing}")
    return HandshakeError(*(body[name] for name in names))


def encode_message(name: MessageName, body: dict[str, str]) -> bytes:
    """Header and JSON body. Raises ValueError if the body is larger than ``MAX_BODY_BYTES``."""
    data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")
    if len(data) > MAX_BODY_BYTES:
        raise ValueError(f"encode_message: body of {len(data)} bytes, at most {MAX_BODY_BYTES} are allowed")
    packed = _HEADER.pack(MAGIC, FORMAT_VERSION, _KINDS[name], len(data), crc32c(data))
    return packed + _CRC.pack(crc32c(packed)) + data


def decode_message_header(data: bytes | bytearray | memoryview, names: tuple[MessageName, ...]) -> tuple[Kind, int, int]:
    """Kind, body bytes, body CRC32C. Raises WireError; the size is within bounds when it returns."""
    if len(data) != HANDSHAKE_HEADER_BYTES:
        raise WireError(WireFault.TRUNCATED, f"{len(data)} bytes, the header has {HANDSHAKE_HEADER_BYTES}")
    kind = check_prefix(data, tuple(_KINDS[name] for name in names))
    given, (stated,) = crc32c(memoryview(data)[: _HEADER.size]), _CRC.unpack_from(data, _HEADER.size)
    if given != stated:
        raise WireError(WireFault.CHECKSUM, f"header: computed {given:#010x}, stated {stated:#010x}")
    _, _, _, body_bytes, body_crc = _HEADER.unpack_from(data)
    if body_bytes > MAX_BODY_BYTES:
        raise WireError(WireFault.SIZE, f"body of {body_bytes} bytes, at most {MAX_BODY_BYTES} are allowed")
    return kind, body_bytes, body_crc


def decode_body(data: bytes | bytearray, body_crc: int) -> dict[str, str]:
    """A JSON object of strings. Raises WireError for anything else."""
    if crc32c(data) != body_crc:
        raise WireError(WireFault.CHECKSUM, "handshake body")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(WireFault.BODY, "handshake body is not JSON") from error
    if not isinstance(body, dict) or not all(isinstance(value, str) for value in body.values()):
        raise WireError(WireFault.BODY, "handshake body must be a JSON object of strings")
    return body


_COMPARED: Final = ("protocol_version", "wire_layout", "kv_spec", "fingerprint")


def _compared(mine: Handshake) -> dict[str, str]:
    """What must be equal on both sides, as text: numbers in decimal, the spec as sorted compact JSON."""
    spec = json.dumps(mine.kv_spec.facts(), sort_keys=True, separators=(",", ":"))
    values = (str(mine.protocol_version), mine.wire_layout, spec, mine.fingerprint)
    return dict(zip(_COMPARED, values, strict=True))


def _terms(mine: Handshake, receiver_epoch: int) -> dict[str, str]:
    return {"name": mine.name, "epoch": str(mine.epoch), "receiver_epoch": str(receiver_epoch), **_compared(mine)}


def _number64(field: str, text: str) -> int:
    # Decimal text, not a JSON number: many JSON readers lose bits above 2^53.
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) < 1 << 64):
        raise WireError(WireFault.BODY, f"{field}: given {text[:40]!r}, must be a 64-bit number in decimal")
    return int(text)


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
