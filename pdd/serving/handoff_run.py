"""Moves the token log of one request from relay to main. The decisions are :mod:`pdd.policy.handoff`'s; this sends the commands."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from pdd.policy.handoff import Commit, HandoffSnapshot, IngestChunk, Overlap, OverlapRules, SealRelay, Wait, next_action, reader_interval_s
from pdd.policy.handoff_choice import HandoffChoiceRules, HandoffChoiceSnapshot, HandoffDecision, HandoffReason, choose_handoff
from pdd.policy_config import PolicyConfig
from pdd.serving.handoff_figures import HandoffFigures
from pdd.serving.holders import Holder
from pdd.serving.metrics import Metrics
from pdd.serving.overlap_race import OverlapRace
from pdd.serving.paced_delivery import PacedDelivery
from pdd.serving.request import Override
from pdd.serving.timeline import TimelineRecorder

# A relay seals after its step in flight. One that takes longer than this is treated as lost: the log is complete without it.
SEAL_TIMEOUT_S = 5.0
# Fewer gaps than this between a request's own relayed tokens say less than those of earlier requests.
_OWN_GAPS = 4
# What a main that nothing is known of was late by, a time or two, may have been luck: by so much more it is taken to be usually.
_UNKNOWN = 1.5


class HandoffRun:
    """``committed``: main was told to decode from the log · ``relay_sealed``: the relay has stopped and can resume ·
    ``seal_deadline``: when (monotonic) to stop waiting for a seal that was asked for · ``relay_limit``: the log length at which the
    relay is to seal by itself. An overlap has none: there a wished ``handoff_at`` is where it begins.
    """

    def __init__(
        self,
        wish: Override,
        policy: PolicyConfig,
        figures: HandoffFigures,
        metrics: Metrics,
        timeline: TimelineRecorder,
        delivery: PacedDelivery,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forced = wish.handoff or (None if policy.handoff == "auto" else policy.handoff)
        self._chunk = policy.catch_up_chunk
        rules = policy.handoff_rules
        self._choice_rules = HandoffChoiceRules(policy.catch_up_chunk, rules.crowded_share, rules.crowded_gap_s, rules.hidden_itls)
        self._overlap_rules = OverlapRules(rules.max_tokens, rules.max_gap_s, rules.pace)
        self._max_cover_s = rules.max_cover_s
        self._figures = figures
        self._metrics = metrics
        self._timeline = timeline
        self._delivery = delivery
        self._clock = clock
        overlaps = self._forced == "overlap"
        self.relay_limit = None if overlaps else wish.handoff_at
        self._begin_at = (wish.handoff_at or 0) if overlaps else 0
        self._decision: HandoffDecision | None = None
        self._sent = 0
        self._ingested = 0
        self._in_flight: deque[tuple[int, int, float]] = deque()  # ingests not answered: log length, tokens, when sent
        self._behind_before: int | None = None
        self._race: OverlapRace | None = None
        self._race_end = ""
        self._main_name: str | None = None
        self._relay_name: str | None = None
        self._reason: HandoffReason = "forced"
        self._seal_is_moot = False
        self._relay_gaps_s: deque[float] = deque(maxlen=32)
        self._last_token: tuple[Holder, float] | None = None
        self.committed = False
        self.relay_sealed = False
        self.seal_deadline: float | None = None

    @property
    def seal_sent(self) -> bool:
        return self.seal_deadline is not None

    def advance(self, main: Holder, relay: Holder | None, log_ids: Sequence[int]) -> None:
        """Do what can be done now. Called after every event once main's prompt KV is complete."""
        self._main_name = main.worker.name
        relay_proposes = relay is not None and not self.relay_sealed
        if relay_proposes and len(log_ids) < self._begin_at:
            return
        while not self.committed or self._race is not None:
            if self._decision is None:
                self._decision = choose_handoff(self._forced, self._choice_snapshot(main, relay, len(log_ids)), self._choice_rules)
            action = next_action(self._decision.mode, self._chunk, self._overlap_rules, self._snapshot(relay_proposes, len(log_ids)))
            if isinstance(action, Wait):
                return
            self._begin(self._decision)
            if isinstance(action, IngestChunk):
                self._behind_before = len(log_ids) - self._sent
                self._send(main, log_ids[action.position : action.position + action.num_tokens], decode=False)
            elif isinstance(action, SealRelay):
                assert relay is not None
                relay.stream.seal()
                self.seal_deadline = self._clock() + SEAL_TIMEOUT_S
                self._race_end = action.cause
                self._timeline.handoff_cover_s = self._delivery.cover_s
            elif isinstance(action, Overlap):
                if self._race is None:
                    self._race, self._race_end = OverlapRace(len(log_ids), self._clock()), ""
                    self.committed = True
                    self._pace()
                self._send(main, log_ids[action.position :], decode=True)
            elif isinstance(action, Commit):
                self._commit(main, log_ids)

    def commit_now(self, main: Holder, log_ids: Sequence[int]) -> None:
        """There is no relay (any more): main goes on from the log as soon as its prompt KV is there, which may be later."""
        if self.committed:
            return
        if log_ids:
            self._begin(self._decision or _without_choice("relay_lost"))
        self._commit(main, log_ids)

    def counts(self, holder: Holder, position: int, token_id: int, log_ids: Sequence[int]) -> bool:
        """Whether ``holder``'s proposal may be offered to the log. In an overlap one that rests on a token that lost may not."""
        if self._race is None or holder.part != "main":
            return True
        duplicates, rewinds = self._race.num_duplicates, self._race.num_rewinds
        counts = self._race.counts(position, token_id, log_ids, self._clock())
        self._timeline.handoff_duplicates += self._race.num_duplicates - duplicates
        if self._race.num_rewinds > rewinds:
            self._timeline.handoff_rewinds += 1
            self._metrics.handoff_rewinds.inc()
        return counts

    def accepted(self, holder: Holder, main: Holder | None) -> float | None:
        """A token of ``holder`` was accepted. Main's first ends the handoff. ``main``: who is to take over once its KV is there, None where
        nobody is, or not before the end. Returns the seconds since ``holder``'s token before this one, None if there was none or another's
        was accepted since.
        """
        now, gap_s = self._clock(), None
        if self._last_token is not None and self._last_token[0] is holder:
            gap_s = now - self._last_token[1]
            self._figures.gap(holder.worker.name, gap_s)
            if holder.part == "relay":
                self._relay_gaps_s.append(gap_s)
        self._last_token = (holder, now)
        if holder.part == "main":
            self._taken_over()
        else:
            self._relay_name = holder.worker.name
            if self._race is not None:
                self._race.accepted(now)
                self._pace()
            elif main is not None:
                self._main_name = main.worker.name
                self._lay_by()
        return gap_s

    def ingested(self, main: Holder, length: int) -> None:
        """Main has the KV of the log up to ``length`` (but for the last token)."""
        self._ingested = max(self._ingested, length)
        while self._in_flight and self._in_flight[0][0] <= length:
            _, num_tokens, sent_s = self._in_flight.popleft()
            self._figures.ingest(main.worker.name, num_tokens, self._clock() - sent_s - main.worker.rtt_s)
        if self._race is not None:
            self._race.ingested(length)

    def sealed(self, relay: Holder, main_is_coming: bool, log_ids: Sequence[int]) -> None:
        """The relay has stopped. It goes on at once where nobody takes over, or where who was to is gone since it was asked."""
        self.relay_sealed = True
        self.seal_deadline = None
        if self._seal_is_moot or not main_is_coming:
            self.resume_relay(relay, log_ids)

    def resume_relay(self, relay: Holder, log_ids: Sequence[int]) -> None:
        """There is no main to take over: the sealed relay proposes again, from the end of the log, and past its limit."""
        self.relay_sealed = self._seal_is_moot = False
        self.relay_limit = None
        relay.stream.ingest(len(log_ids), (), decode=True)

    def relay_gone(self) -> None:
        self.relay_sealed = self._seal_is_moot = False
        self.seal_deadline = None

    def main_reset(self) -> None:
        """Main's part is free, or another attach has taken it that has nothing of the log yet."""
        self._sent = self._ingested = 0
        self._in_flight.clear()
        self._decision = None
        self._behind_before = None
        self._seal_is_moot = self.seal_sent
        self.committed = False
        if self._race is not None:
            self._end_race("main_lost")
        self._delivery.catch_up()

    def main_opened_with(self, log_ids: Sequence[int]) -> None:
        """Main was opened with the log as it stands and decodes by itself."""
        if self._timeline.tokens["relay"] > 0 and self._timeline.handoff_done_s is None:
            self._begin(self._decision or _without_choice("resumed"))
        self._sent = self._ingested = len(log_ids)
        self.committed = True
        self.seal_deadline = None

    def _begin(self, decision: HandoffDecision) -> None:
        self._timeline.handoff = decision.mode
        self._timeline.handoff_reason = f"{decision.reason}: {decision.text}"
        self._timeline.handoff_predicted_gap_s = decision.predicted_gap_s
        self._reason = decision.reason
        if self._timeline.handoff_start_s is None:
            self._timeline.handoff_start_s = self._timeline.now_s()

    def _commit(self, main: Holder, log_ids: Sequence[int]) -> None:
        self._send(main, log_ids[self._sent :], decode=True)
        self.committed = True
        self.seal_deadline = None

    def _send(self, main: Holder, token_ids: Sequence[int], decode: bool) -> None:
        main.stream.ingest(self._sent, token_ids, decode=decode)
        self._sent += len(token_ids)
        self._in_flight.append((self._sent, len(token_ids), self._clock()))

    def _taken_over(self) -> None:
        """The relay, which could have resumed until now, is not needed any more."""
        self.seal_deadline = None
        timeline = self._timeline
        if timeline.handoff_done_s is None and timeline.handoff_start_s is not None:
            timeline.handoff_left_s = self._delivery.cover_s
            if timeline.handoff_cover_s is None:
                timeline.handoff_cover_s = timeline.handoff_left_s
        if self._race is not None:
            self._end_race(self._race_end or ("relay_stopped" if self.relay_sealed else "main_first"))
        self._delivery.catch_up()
        if timeline.handoff_start_s is not None and timeline.handoff_done_s is None:
            timeline.handoff_done_s = timeline.now_s()
            self._metrics.handoffs.labels(timeline.handoff, self._reason).inc()
            self._metrics.handoff_s.observe(timeline.handoff_done_s - timeline.handoff_start_s)

    def _end_race(self, end: str) -> None:
        if self._race is not None and self._main_name is not None:
            self._figures.overlap(self._main_name, self._race.delays_s)
        self._race = None
        self._race_end = ""
        self._metrics.overlaps.labels(end).inc()

    def _pace(self) -> None:
        interval_s = reader_interval_s(self._overlap_rules.pace, self._relay_itl_s(), self._steady_itl_s())
        if interval_s > 0 and self._overlap_rules.pace > 1 and not self.seal_sent:
            self._delivery.slow_to(interval_s, self._max_cover_s)

    def _lay_by(self) -> None:
        """Main's KV is under way. The reader gets the relay's tokens no faster than tokens come as a rule, which is how they will come from
        main, until as much is in hand as main will be late by.
        """
        steady_s, usual_s = self._steady_itl_s(), self._usual_delay_s()
        may = self._forced in (None, "overlap") and self.relay_limit is None and not self.seal_sent
        if may and self._overlap_rules.pace > 1 and steady_s is not None and usual_s is not None:
            self._delivery.slow_to(steady_s, usual_s)

    def _relay_itl_s(self) -> float | None:
        if len(self._relay_gaps_s) >= _OWN_GAPS:
            return median(self._relay_gaps_s)
        return None if self._last_token is None else self._figures.itl_s(self._last_token[0].worker.name)

    def _steady_itl_s(self) -> float | None:
        return self._figures.steady_itl_s(name for name in (self._main_name, self._relay_name) if name is not None)

    def _usual_delay_s(self) -> float | None:
        """What main's delay rarely exceeds, as far as it may be covered at all."""
        usual_s = None if self._main_name is None else self._figures.usual_delay_s(self._main_name)
        return None if usual_s is None else min(usual_s, self._max_cover_s)

    def _main_itl_s(self) -> float | None:
        return None if self._main_name is None else self._figures.itl_s(self._main_name)

    def _snapshot(self, relay_proposes: bool, log_tokens: int) -> HandoffSnapshot:
        race, usual_s = self._race, self._usual_delay_s()
        delay_s = None if race is None else race.delay_s(self._clock(), is_known=usual_s is not None)
        if usual_s is None and delay_s is not None:
            usual_s = _UNKNOWN * delay_s
        return HandoffSnapshot(
            log_tokens=log_tokens,
            sent_tokens=self._sent,
            ingesting=self._ingested < self._sent,
            relay_proposes=relay_proposes,
            seal_sent=self.seal_sent,
            relay_stops_by_itself=self.relay_limit is not None,
            behind_before=self._behind_before,
            overlap_tokens=None if race is None else race.num_relayed,
            main_delay_s=delay_s,
            usual_delay_s=usual_s,
            cover_s=self._delivery.cover_s,
            relay_itl_s=self._relay_itl_s(),
            steady_itl_s=self._steady_itl_s(),
        )

    def _choice_snapshot(self, main: Holder, relay: Holder | None, log_tokens: int) -> HandoffChoiceSnapshot:
        return HandoffChoiceSnapshot(
            backlog_tokens=log_tokens,
            relay_running=0 if relay is None else relay.worker.num_held,
            relay_capacity=1 if relay is None else max(1, relay.worker.info.max_rows),
            relay_stops_by_itself=self.relay_limit is not None,
            rtt_s=main.worker.rtt_s,
            main_is_alone=main.worker.num_held <= 1,
            extend_s_per_token=self._figures.extend_s_per_token(main.worker.name),
            main_itl_s=self._main_itl_s(),
            steady_itl_s=self._steady_itl_s(),
        )


def _without_choice(reason: HandoffReason) -> HandoffDecision:
    return HandoffDecision("one_shot", reason, "main goes on from the log", None)
