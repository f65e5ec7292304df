"""How a request is brought into each state of its life, and held there: a slow link, a stopped process, a handoff at a fixed token.

Nothing waits for a fixed time: each state is recognised by what the client has and what the ledgers say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from pdd.chaos.outcome import Outcome
from pdd.chaos.traffic import Ask
from pdd.serving.request import HandoffName, PipelineName
from pdd.serving.sampling_check import SamplingWish
from pddbridge.rpc.gen import worker_pb2

State = Literal["queued", "prefilling", "awaiting_kv", "relaying", "catching_up", "overlap", "sealed", "main", "finishing"]
_POLL_S: Final = 0.002
_SLOW_MBIT_S: Final = 0.5
_PROMPT_TOKENS: Final = 160


class Bench(Protocol):
    """What a state is driven with. ``frozen`` processes are thawed, and the link is at full speed again, when the victim has died."""

    outcome: Outcome
    kv_bytes_per_token: int

    def freeze(self, worker: str) -> None: ...
    def slow_down(self, rate_mbit_s: float) -> None: ...
    def ledger(self, worker: str) -> worker_pb2.LedgerReply: ...
    def ask(self) -> None: ...


class NotReachedError(Exception):
    """The request was not in the state in time, or has gone past it."""


@dataclass(frozen=True)
class StateDriver:
    """``reach`` asks and returns when the request is in the state."""

    state: State
    reach: Callable[[Bench], None]
    max_tokens: int
    pipeline: PipelineName
    handoff: HandoffName | None = None
    handoff_at: int | None = None

    def request(self, number: int, salt: str) -> Ask:
        """Over the gRPC door, whose stream tells who made each token. Every cell has the same prompt and a cache of its own."""
        return Ask(
            number=number,
            at_s=0.0,
            door="grpc",
            stream=True,
            prompt=tuple(30 + 7 * i % 200 for i in range(_PROMPT_TOKENS)),
            wish=SamplingWish(max_tokens=self.max_tokens, temperature=0.0, repetition_penalty=1.1, ignore_eos=True),
            seed=1,
            stop=(),
            salt=salt,
            pipeline=self.pipeline,
            handoff=self.handoff,
            handoff_at=self.handoff_at,
        )


def until(reached: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    """Raises NotReachedError."""
    deadline_s = time.monotonic() + within_s
    while not reached():
        if time.monotonic() > deadline_s:
            raise NotReachedError(what)
        time.sleep(_POLL_S)


@dataclass
class _Counts:
    """What a worker has done since this was made."""

    bench: Bench
    worker: str
    before: worker_pb2.LedgerReply = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.bench.ledger(self.worker)

    def grew(self, name: str) -> int:
        return int(getattr(self.bench.ledger(self.worker), name)) - int(getattr(self.before, name))


def _queued(bench: Bench) -> None:
    """Main has yet to say what it holds."""
    bench.freeze("main-0")
    bench.ask()
    until(lambda: bench.ledger("relay-0").num_requests == 1, "relay has reserved")


def _prefilling(bench: Bench) -> None:
    bench.freeze("prefill-0")
    bench.ask()
    until(lambda: bench.ledger("main-0").num_incoming_transfers == 1, "main has reserved")


def _awaiting_kv(bench: Bench) -> None:
    bench.slow_down(_SLOW_MBIT_S)
    prefill = _Counts(bench, "prefill-0")
    bench.ask()
    until(lambda: prefill.grew("computed_prompt_tokens") >= _PROMPT_TOKENS - 1, "prefill is done")
    until(lambda: bench.ledger("main-0").num_incoming_transfers == 1, "main awaits KV")


def _relaying(bench: Bench) -> None:
    bench.slow_down(_SLOW_MBIT_S)
    bench.ask()
    until(lambda: len(bench.outcome.ids) >= 5, "relay has made five tokens")


def _catching_up(bench: Bench) -> None:
    main = _Counts(bench, "main-0")
    bench.ask()
    until(lambda: main.grew("computed_log_tokens") > 8, "main has taken in a chunk")
    if "main" in bench.outcome.origins:
        raise NotReachedError("main has taken over already")


def _frozen_at_handoff(bench: Bench, tokens: int) -> None:
    """Main has its KV and is stopped before the handoff, which then lasts as long as it is."""
    main = _Counts(bench, "main-0")
    bench.ask()
    due = (_PROMPT_TOKENS - 1) * bench.kv_bytes_per_token
    until(lambda: main.grew("kv_bytes_received") >= due, "main has its KV")
    bench.freeze("main-0")
    if len(bench.outcome.ids) >= _HANDOFF_AT:
        raise NotReachedError("the handoff has begun already")
    until(lambda: len(bench.outcome.ids) >= tokens, "the handoff has begun")


def _overlap(bench: Bench) -> None:
    _frozen_at_handoff(bench, _HANDOFF_AT + 10)


def _sealed(bench: Bench) -> None:
    _frozen_at_handoff(bench, _HANDOFF_AT)


def _main(bench: Bench) -> None:
    bench.ask()
    until(lambda: bench.outcome.origins.count("main") >= 5, "main has made five tokens")


def _finishing(bench: Bench) -> None:
    bench.ask()
    until(lambda: bench.outcome.num_ends > 0, "the last token has come")


_HANDOFF_AT: Final = 350
STATES: Final = (
    StateDriver("queued", _queued, 470, "relay"),
    StateDriver("prefilling", _prefilling, 470, "relay"),
    StateDriver("awaiting_kv", _awaiting_kv, 120, "direct"),
    StateDriver("relaying", _relaying, 300, "relay"),
    StateDriver("catching_up", _catching_up, 470, "relay", "catch_up", 440),
    StateDriver("overlap", _overlap, 470, "relay", "overlap", _HANDOFF_AT),
    StateDriver("sealed", _sealed, 470, "relay", "one_shot", _HANDOFF_AT),
    StateDriver("main", _main, 300, "relay", "one_shot", 20),
    StateDriver("finishing", _finishing, 60, "relay", "one_shot", 20),
)
