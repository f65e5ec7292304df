"""A relay and a main that race for one log under a clock by hand: the real handoff, the real log and the workers' real request states,
with messages that are delivered when the test says so. Tokens follow from request and log; main may differ at chosen positions.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

from pdd.policy_config import PolicyConfig
from pdd.serving.acceptor import Acceptor
from pdd.serving.handoff_figures import HandoffFigures
from pdd.serving.handoff_run import HandoffRun
from pdd.serving.holders import Holder
from pdd.serving.metrics import Metrics
from pdd.serving.paced_delivery import PacedDelivery
from pdd.serving.request import Delta
from pdd.serving.timeline import TimelineRecorder
from pdd.serving.worker_events import Event, Ingested, Proposed, Sealed
from pdd.worker.request import Phase, RequestState
from pdd.worker.token_sequence import TokenSequence
from pddbridge.sampling_params import TokenRecord
from tests.support.generation import make_request, params

VOCAB = 300
PROMPT = (7, 8, 9)
Part = Literal["relay", "main"]


class HandClock:
    """``later`` callbacks run when ``advance`` passes them, in order of time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, int, Callable[[], None], SimpleNamespace]] = []
        self._num_made = 0

    def __call__(self) -> float:
        return self.now_s

    def later(self, delay_s: float, callback: Callable[[], None]) -> SimpleNamespace:
        timer = SimpleNamespace(cancelled=False)
        timer.cancel = lambda: setattr(timer, "cancelled", True)
        self._num_made += 1
        self._timers.append((self.now_s + delay_s, self._num_made, callback, timer))
        return timer

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := sorted(t for t in self._timers if t[0] <= end_s and not t[3].cancelled):
            at_s, _, callback, _ = due[0]
            self._timers.remove(due[0])
            self.now_s = max(self.now_s, at_s)
            callback()
        self._timers = [t for t in self._timers if not t[3].cancelled]
        self.now_s = end_s


class ModelWorker:
    """The worker's side of one stream. ``inbox``, ``outbox``: messages under way."""

    def __init__(self, token: Callable[[Sequence[int]], int], decode: bool, max_tokens: int) -> None:
        self.token = token
        self.inbox: deque[tuple[str, tuple[object, ...]]] = deque()
        self.outbox: deque[Event] = deque()
        self.num_proposed = 0
        self.proposed_when_sealed = 0
        self.is_sealed = False
        self.state = RequestState(
            "r", "t", len(PROMPT), TokenSequence(PROMPT), params(max_tokens), True, decode, None, 1000, 1, 1e9, None, phase=Phase.ACTIVE
        )
        self.state.kv_len = len(PROMPT) - 1

    def ingest(self, position: int, token_ids: Sequence[int], decode: bool) -> None:
        self.inbox.append(("ingest", (position, tuple(token_ids), decode)))

    def seal(self) -> None:
        self.inbox.append(("seal", ()))

    def take(self) -> None:
        """Handle the next command, if one has come."""
        if not self.inbox:
            return
        kind, arguments = self.inbox.popleft()
        if kind == "seal":
            self.state.decode = False
            self.is_sealed = True
            self.outbox.append(Sealed(self.state.log_len))
            return
        position, token_ids, decode = arguments
        cut = self.state.ingest(position, token_ids, decode, VOCAB)  # type: ignore[arg-type]
        if cut is not None:
            self.state.kv_len = min(self.state.kv_len, len(PROMPT) + cut)
        self.is_sealed = self.is_sealed and not decode
        self._answer()
        assert not self.state.settle()

    def step(self) -> None:
        if not self.state.num_pending:
            return
        self.state.kv_len = self.state.target_len
        self._answer()
        if not self.state.decode:
            return
        chosen = self.token(self.state.log_ids())
        self.outbox.append(Proposed(self.state.log_len, (TokenRecord(chosen),)))
        self.state.tokens.append(chosen)
        self.num_proposed += 1
        self.proposed_when_sealed += self.is_sealed
        assert not self.state.settle()

    def _answer(self) -> None:
        for length in self.state.answered_ingests():
            self.outbox.append(Ingested(length))


@dataclass
class Race:
    """``differs``: log positions at which main would choose otherwise. ``figures``: of earlier races. ``delivered``: what the reader has,
    with when.
    """

    differs: frozenset[int]
    max_tokens: int = 30
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(handoff="overlap", catch_up_chunk=4))
    figures: HandoffFigures = field(default_factory=HandoffFigures)

    def __post_init__(self) -> None:
        self.clock = HandClock()
        self.delivered: list[tuple[float, Delta]] = []
        self.origins: list[Part] = []
        delivery = PacedDelivery(lambda delta: self.delivered.append((self.clock(), delta)), self.clock, self.clock.later)
        request = make_request(prompt_ids=PROMPT, sampling=params(self.max_tokens))
        self.acceptor = Acceptor(request, None)
        self.timeline = TimelineRecorder(clock=self.clock)
        self.metrics = Metrics()
        self.run = HandoffRun(request.override, self.policy, self.figures, self.metrics, self.timeline, delivery, self.clock)
        self.delivery = delivery
        self.workers: dict[Part, ModelWorker] = {
            "relay": ModelWorker(relay_token, True, self.max_tokens),
            "main": ModelWorker(self.main_token, False, self.max_tokens),
        }
        self.holders: dict[Part, Holder | None] = {part: self._holder(part) for part in ("relay", "main")}
        self.main_has_kv = False

    def main_token(self, log_ids: Sequence[int]) -> int:
        return (relay_token(log_ids) + (len(log_ids) in self.differs)) % VOCAB

    @property
    def log(self) -> list[int]:
        return list(self.acceptor.log.ids)

    @property
    def finished(self) -> bool:
        return self.acceptor.finish_reason is not None

    def kv_complete(self) -> None:
        self.main_has_kv = True
        self._advance()

    def hear(self, part: Part) -> None:
        """The coordinator gets the next event of a worker, if one is under way."""
        holder, outbox = self.holders[part], self.workers[part].outbox
        if not outbox:
            return
        event = outbox.popleft()
        if holder is None or self.finished:
            return
        if isinstance(event, Proposed):
            self._proposed(holder, part, event)
        elif isinstance(event, Ingested) and part == "main":
            self.run.ingested(holder, event.length)
        elif isinstance(event, Sealed):
            assert event.length == len(self.log)
            self.run.sealed(holder, self.holders["main"] is not None, self.log)
        self._advance()

    def lose_main(self) -> None:
        """Main dies; its relay goes on."""
        if self.holders["main"] is None or self.holders["relay"] is None:
            return
        self.holders["main"] = None
        self.run.main_reset()
        if self.run.relay_sealed:
            self.run.resume_relay(self.holders["relay"], self.log)

    def lose_relay(self) -> None:
        main = self.holders["main"]
        if main is None or self.holders["relay"] is None:
            return
        self.holders["relay"] = None
        self.run.relay_gone()
        self.run.commit_now(main, self.log)

    def _proposed(self, holder: Holder, part: Part, event: Proposed) -> None:
        for position, record in enumerate(event.records, event.position):
            if not self.run.counts(holder, position, record.token_id, self.log):
                continue
            before = self.log
            delta = self.acceptor.accept(position, record, part)
            if delta is None:
                continue
            assert record.token_id == self.workers[part].token(before), "it rests on the log as it is"
            self.origins.append(part)
            self.timeline.accepted(part)
            self.run.accepted(holder, self.holders["main"])
            if part == "main":
                self.holders["relay"] = None
            self.delivery.push(delta)

    def _advance(self) -> None:
        main = self.holders["main"]
        if main is not None and self.main_has_kv and not self.finished:
            self.run.advance(main, self.holders["relay"], self.log)

    def _holder(self, part: Part) -> Holder:
        worker = SimpleNamespace(
            name=f"{part}-0", num_held=1, info=SimpleNamespace(max_rows=8), rtt_s=0.0, place=SimpleNamespace(role=part)
        )
        return Holder(part, worker, self.workers[part], False)  # type: ignore[arg-type]


def relay_token(log_ids: Sequence[int]) -> int:
    return 10 + zlib.crc32(repr(list(log_ids)).encode()) % 280
