"""What passes between the event loop and the step thread: commands in, events out. Frozen; owns no state."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from pdd.errors import Code
from pdd.worker.host_tier import TierCounts
from pdd.worker.metrics import Counters
from pdd.worker.pages import PageCounts
from pddbridge.engine import KVBlock
from pddbridge.kv_spec import TokenRange
from pddbridge.links.slot_loans import Lend
from pddbridge.sampling_params import SamplingParams, TokenRecord

T = TypeVar("T")


def resolve(reply: Future[T], value: T) -> None:
    """Answer, unless who asked no longer waits."""
    if _awaited(reply):
        reply.set_result(value)


def fail(reply: Future[T], error: BaseException) -> None:
    """Answer with ``error``, unless who asked has an answer or no longer waits."""
    if _awaited(reply):
        reply.set_exception(error)


def _awaited(reply: Future[T]) -> bool:
    return not reply.done() and (reply.running() or reply.set_running_or_notify_cancel())


@dataclass(frozen=True)
class PushTo:
    """A receiver of prompt KV from position ``first_token`` on. ``lend``: memory of its link, called by the step thread."""

    target: str
    first_token: int
    lend: Lend | None = None


@dataclass(frozen=True)
class OpenRequest:
    """``transfer``: await the KV that the prefix cache lacks instead of computing it. ``deadline``: by the step loop's monotonic clock.
    ``prompt_logprobs``: score the prompt, with so many of the most likely tokens.
    """

    request_id: str
    tenant: str
    prompt_ids: tuple[int, ...]
    log_ids: tuple[int, ...]
    params: SamplingParams
    transfer: bool
    decode: bool
    max_propose_tokens: int | None
    push_to: tuple[PushTo, ...]
    deadline: float
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class AddPush:
    """One more receiver of the prompt's KV, of what is computed already too."""

    request_id: str
    push_to: PushTo


@dataclass(frozen=True)
class IngestTokens:
    request_id: str
    position: int
    token_ids: tuple[int, ...]
    decode: bool


@dataclass(frozen=True)
class SealRequest:
    request_id: str


@dataclass(frozen=True)
class CloseRequest:
    """Forget the request and return its pages. Its incoming transfer is fenced before. Unknown requests are fine: closing is idempotent."""

    request_id: str
    done: Future[None]


@dataclass(frozen=True)
class FailRequest:
    """Something outside the step thread ended the request."""

    request_id: str
    code: Code
    message: str


@dataclass(frozen=True)
class PlaceKV:
    """Write a received block into the request's pages. ``done`` fails with LookupError when the request no longer awaits KV."""

    request_id: str
    block: KVBlock
    done: Future[None]


@dataclass(frozen=True)
class TransferComplete:
    """Everything that was expected is placed. ``num_bytes``: of KV as stored; ``wire_bytes``: of the payloads that carried it."""

    request_id: str
    num_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class PushAcknowledged:
    """``target`` acknowledged ``num_bytes`` more of what was read for it."""

    request_id: str
    target: str
    num_bytes: int


@dataclass(frozen=True)
class PushEnded:
    """Nothing more is read for ``target``: it has everything, or its transfer failed."""

    request_id: str
    target: str


@dataclass(frozen=True)
class TakeSnapshot:
    reply: Future[Snapshot]


Command = (
    OpenRequest
    | AddPush
    | IngestTokens
    | SealRequest
    | CloseRequest
    | FailRequest
    | PlaceKV
    | TransferComplete
    | PushAcknowledged
    | PushEnded
    | TakeSnapshot
)


@dataclass(frozen=True)
class Snapshot:
    """The ledger and the counters at one moment between two steps. See pdd.v1.LedgerReply."""

    pages: PageCounts
    host: TierCounts
    host_pages_lost: int
    num_requests: int
    counters: Counters
    preemptions: int
    compilations_after_ready: int
    graphed_steps: int
    engine_fallbacks: dict[str, int]
    tokens_chosen: dict[str, int]


@dataclass(frozen=True)
class Refused:
    """The request was not taken; nothing is held for it."""

    code: Code
    message: str


@dataclass(frozen=True)
class Reserved:
    """Pages are reserved. ``missing``: prompt positions whose KV is to be received; None when nothing is."""

    hit_tokens: int
    missing: TokenRange | None


@dataclass(frozen=True)
class Prefilled:
    computed_tokens: int


@dataclass(frozen=True)
class KvComplete:
    received_tokens: int
    received_bytes: int
    received_wire_bytes: int


@dataclass(frozen=True)
class KVRead:
    """KV of prompt positions ``tokens``, copied to the host, for ``targets``."""

    tokens: TokenRange
    blocks: tuple[KVBlock, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Tokens:
    position: int
    records: tuple[TokenRecord, ...]


@dataclass(frozen=True)
class PromptScores:
    """``records`` of the prompt tokens from ``position`` on."""

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
    """The request is over here; its pages return with CloseRequest."""

    code: Code
    message: str


Event = Refused | Reserved | Prefilled | KvComplete | KVRead | Tokens | PromptScores | Ingested | Sealed | Failed
