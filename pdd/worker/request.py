"""One request on a worker: its tokens, how far its KV is, and what it still has to do. Owns the decisions when to propose and when to stop.

``tokens = prompt + log``. KV of positions ``[0, kv_len)`` is in ``pages``. A request that proposes computes to the end and samples
there; one that does not leaves the last known token alone: it is the next step's input, wherever that step is made.

Of the log, ``[0, given_len)`` was given by the coordinator and is final. What follows was proposed here; another worker may have been
first with another token, and then the request is rewound to what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from pdd.worker.push_feed import PushFeed
from pdd.worker.token_sequence import TokenSequence
from pddbridge.sampling_params import SamplingParams
from pddbridge.stops import finish_reason


class Phase(Enum):
    """``WAITING``: no pages yet, or taken away by a preemption. ``RECEIVING``: pages reserved, a transfer writes them. ``ACTIVE``: KV of
    ``[0, kv_len)`` is here and rows may be computed. ``OVER``: failed; pages stay until it is closed.
    """

    WAITING = auto()
    RECEIVING = auto()
    ACTIVE = auto()
    OVER = auto()


class IngestError(ValueError):
    """Ingested tokens contradict what was given before, leave a gap or do not fit."""


@dataclass(eq=False)
class RequestState:
    """Mutable; owned by the step thread. ``order``: arrival. ``deadline``: monotonic seconds. ``from_transfer``: its prompt's KV comes
    from elsewhere. ``prompt_logprobs``: every prompt token but the first is scored, with so many of the most likely; so all are computed.
    """

    request_id: str
    tenant: str
    prompt_len: int
    tokens: TokenSequence
    params: SamplingParams
    from_transfer: bool
    decode: bool
    propose_limit: int | None
    max_context_tokens: int
    order: int
    deadline: float
    push: PushFeed | None
    prompt_logprobs: int | None = None
    given_len: int = 0
    phase: Phase = Phase.WAITING
    kv_len: int = 0
    pages: list[int] = field(default_factory=list)
    hit_tokens: int = 0
    computed_prompt_tokens: int = 0
    last_step: int = 0
    chunks_waited: int = 0  # steps with a chunk that left out its decode row, since its last row
    prompt_reported: bool = False  # Prefilled or KvComplete was sent
    was_admitted: bool = False  # Reserved was sent
    unanswered_ingests: list[int] = field(default_factory=list)  # log lengths, in order

    @property
    def log_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def prompt_kv_len(self) -> int:
        """Prompt positions whose KV comes from prefill: all but the last, which is the first decode step's input."""
        return self.prompt_len - 1

    @property
    def target_len(self) -> int:
        """How far KV is wanted now."""
        return len(self.tokens) if self.decode else len(self.tokens) - 1

    @property
    def num_pending(self) -> int:
        return max(0, self.target_len - self.kv_len)

    @property
    def scores_pending(self) -> bool:
        """Whether tokens that are yet to be computed are scored."""
        return self.prompt_logprobs is not None and self.kv_len < self.prompt_kv_len

    @property
    def is_decode_row(self) -> bool:
        """Whether all that is left to compute is one token, which samples."""
        return self.phase is Phase.ACTIVE and self.decode and self.num_pending == 1

    @property
    def has_open_transfer(self) -> bool:
        """Whether its pages are written, or still to be read, by a transfer."""
        return self.phase is Phase.RECEIVING or (self.push is not None and not self.push.finished)

    def log_ids(self) -> Sequence[int]:
        return self.tokens.view(self.prompt_len, len(self.tokens)).tolist()

    def may_propose(self) -> bool:
        """Whether another token may follow the log by the stop rules. The limit of ``propose_limit`` is not one of them."""
        return self.log_len == 0 or finish_reason(self.params, self.log_ids()) is None

    def at_limit(self) -> bool:
        """Whether proposing ends here as if sealed: the asked-for length, or the context, is full."""
        full = len(self.tokens) >= self.max_context_tokens
        return full or (self.propose_limit is not None and self.log_len >= self.propose_limit)

    def settle(self) -> bool:
        """After the log or ``decode`` changed: stop proposing where a stop rule or a limit says so.

        True when that is to be reported as a seal: a limit ends proposing as a Seal would, a stop rule ends the request itself.
        """
        if not self.decode:
            return False
        if not self.may_propose():
            self.decode = False
            return False
        if self.at_limit():
            self.decode = False
            return True
        return False

    def ingest(self, position: int, token_ids: Sequence[int], decode: bool, vocab_size: int) -> int | None:
        """Compare what is known, append what is new; ``decode`` asks to propose afterwards and lifts a ``propose_limit`` that was reached.

        Where a token differs from one that was proposed here, the log is cut there and continued with what is given. Returns the log
        position of the cut, whose KV and all after it are void, or None. Raises IngestError; the log is then unchanged.
        """
        log_len = self.log_len
        if position > log_len:
            raise IngestError(f"ingest: position {position} leaves a gap, the log has {log_len} tokens")
        if bad := [t for t in token_ids if not 0 <= t < vocab_size]:
            raise IngestError(f"ingest: token id {bad[0]} outside the vocabulary of {vocab_size}")
        if self.prompt_len + position + len(token_ids) > self.max_context_tokens:
            raise IngestError(
                f"ingest: {self.prompt_len + position + len(token_ids)} tokens exceed the context of {self.max_context_tokens}"
            )
        known = self.tokens.view(self.prompt_len + position, len(self.tokens)).tolist()
        num_equal = next((n for n, (mine, given) in enumerate(zip(known, token_ids, strict=False)) if mine != given), len(known))
        cut: int | None = None
        if num_equal < min(len(known), len(token_ids)):
            cut = position + num_equal
            if cut < self.given_len:
                raise IngestError(f"ingest: position {cut} holds token {known[num_equal]}, given {token_ids[num_equal]}")
            self.tokens.truncate(self.prompt_len + cut)
        for token_id in token_ids[num_equal:]:
            self.tokens.append(token_id)
        self.given_len = max(self.given_len, position + len(token_ids))
        self.unanswered_ingests.append(position + len(token_ids))
        if decode:
            self.decode = True
            if self.propose_limit is not None and self.log_len >= self.propose_limit:
                self.propose_limit = None
        return cut

    def answered_ingests(self) -> list[int]:
        """Take the ingests whose KV is here, all but the KV of their last token."""
        here = [n for n in self.unanswered_ingests if self.kv_len >= self.prompt_len + n - 1]
        self.unanswered_ingests = self.unanswered_ingests[len(here) :]
        return here
