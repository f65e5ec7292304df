"""What a worker tells the coordinator, as plain data: the events of ``pdd.v1.Worker/Attach``."""

from __future__ import annotations

from dataclasses import dataclass

from pdd.errors import Code
from pddbridge.rpc.convert import record_from_proto
from pddbridge.rpc.gen import worker_pb2
from pddbridge.sampling_params import TokenRecord


@dataclass(frozen=True)
class Reserved:
    """``transfer_id`` 0: nothing is to be received."""

    hit_tokens: int
    transfer_id: int
    epoch: int


@dataclass(frozen=True)
class Prefilled:
    computed_tokens: int


@dataclass(frozen=True)
class KvComplete:
    """Bytes of KV as stored, and of the payloads that carried it."""

    received_tokens: int
    received_bytes: int
    received_wire_bytes: int


@dataclass(frozen=True)
class Pushed:
    """Bytes as :class:`KvComplete`."""

    target: str
    tokens: int
    num_bytes: int
    wire_bytes: int
    codec: str


@dataclass(frozen=True)
class PushFailed:
    """Only the push to ``target`` failed; the worker's request goes on."""

    target: str
    message: str


@dataclass(frozen=True)
class Proposed:
    """Tokens for log positions from ``position`` on."""

    position: int
    records: tuple[TokenRecord, ...]


@dataclass(frozen=True)
class PromptScored:
    """Log-probabilities of prompt tokens from ``position`` on."""

    position: int
    records: tuple[TokenRecord, ...]


@dataclass(frozen=True)
class Ingested:
    length: int


@dataclass(frozen=True)
class Sealed:
    length: int


@dataclass(frozen=True)
class Failed:
    """The request is over on that worker. ``died``: the process or the connection is gone, rather than a living worker saying so."""

    code: Code
    message: str
    died: bool


@dataclass(frozen=True)
class SharedAtMain:
    """Not a worker's word: another request has brought this prompt's KV to main, or will not, so main is to be opened now."""


Event = SharedAtMain | Reserved | Prefilled | KvComplete | Pushed | PushFailed | Proposed | PromptScored | Ingested | Sealed | Failed


def code_from_name(name: str) -> Code:
    """gRPC status name to our code; a name that is not among ours (ABORTED, DATA_LOSS, ...) is INTERNAL."""
    return Code[name] if name in Code.__members__ else Code.INTERNAL


def event_from_proto(message: worker_pb2.WorkerEvent, vocab_size: int) -> Event:
    """Raises ValueError for an event that is empty or holds a token id outside the vocabulary."""
    match message.WhichOneof("event"):
        case "reserved":
            return Reserved(message.reserved.hit_tokens, message.reserved.transfer_id, message.reserved.epoch)
        case "prefilled":
            return Prefilled(message.prefilled.computed_tokens)
        case "kv_complete":
            complete = message.kv_complete
            return KvComplete(complete.received_tokens, complete.received_bytes, complete.received_wire_bytes)
        case "pushed":
            pushed = message.pushed
            return Pushed(pushed.target, pushed.tokens, pushed.bytes, pushed.wire_bytes, pushed.codec)
        case "tokens":
            records = tuple(record_from_proto(record, vocab_size) for record in message.tokens.records)
            return Proposed(message.tokens.position, records)
        case "prompt_scores":
            scored = tuple(record_from_proto(record, vocab_size) for record in message.prompt_scores.records)
            return PromptScored(message.prompt_scores.position, scored)
        case "ingested":
            return Ingested(message.ingested.length)
        case "sealed":
            return Sealed(message.sealed.length)
        case "failed" if message.failed.target:
            return PushFailed(message.failed.target, message.failed.message)
        case "failed":
            return Failed(code_from_name(message.failed.code), message.failed.message, died=False)
        case other:
            raise ValueError(f"worker event: given {other!r}, which is not known here")
