"""Moves the token log of one request from relay to main. The decisions are :mod:`pdd.policy.handoff`'s; this sends the commands."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdd.policy.handoff import Commit, HandoffMode, HandoffSnapshot, IngestChunk, SealRelay, Wait, choose_handoff, next_action
from pdd.serving.holders import Holder
from pdd.serving.timeline import TimelineRecorder

# A relay seals after its step in flight. One that takes longer than this is treated as lost: the log is complete without it.
SEAL_TIMEOUT_S = 5.0


class HandoffRun:
    """``committed``: main was told to decode from the log · ``relay_sealed``: the relay has stopped and can resume ·
    ``seal_deadline``: when (monotonic) to stop waiting for a seal that was asked for.
    """

    def __init__(self, forced: HandoffMode | None, catch_up_chunk: int, relay_limit: int | None, timeline: TimelineRecorder) -> None:
        """``relay_limit``: the log length at which the relay seals by itself."""
        self._forced = forced
        self._chunk = catch_up_chunk
        self._relay_limit = relay_limit
        self._timeline = timeline
        self._mode: HandoffMode | None = None
        self._sent = 0
        self._ingested = 0
        self._behind_before: int | None = None
        self.committed = False
        self.relay_sealed = False
        self.seal_deadline: float | None = None

    @property
    def seal_sent(self) -> bool:
        return self.seal_deadline is not None

    def advance(self, main: Holder, relay: Holder | None, log_ids: Sequence[int]) -> None:
        """Do what can be done now. Called after every event once main's prompt KV is complete."""
        if self.committed:
            return
        if self._mode is None:
            self._mode = choose_handoff(self._forced, len(log_ids), self._chunk)
        while not self.committed:
            snapshot = HandoffSnapshot(
                log_tokens=len(log_ids),
                sent_tokens=self._sent,
                ingesting=self._ingested < self._sent,
                relay_proposes=relay is not None and not self.relay_sealed,
                seal_sent=self.seal_sent,
                relay_stops_by_itself=self._relay_limit is not None,
                behind_before=self._behind_before,
            )
            action = next_action(self._mode, self._chunk, snapshot)
            if isinstance(action, Wait):
                return
            self._begin(self._mode)
            if isinstance(action, IngestChunk):
                self._behind_before = len(log_ids) - self._sent
                main.stream.ingest(action.position, log_ids[action.position : action.position + action.num_tokens], decode=False)
                self._sent = action.position + action.num_tokens
            elif isinstance(action, SealRelay):
                assert relay is not None
                relay.stream.seal()
                self.seal_deadline = time.monotonic() + SEAL_TIMEOUT_S
            elif isinstance(action, Commit):
                self._commit(main, log_ids)

    def commit_now(self, main: Holder, log_ids: Sequence[int]) -> None:
        """There is no relay (any more): main goes on from the log as soon as its prompt KV is there, which may be later."""
        if self.committed:
            return
        if log_ids:
            self._begin(self._mode or "one_shot")
        self._commit(main, log_ids)

    def ingested(self, length: int) -> None:
        """Main has the KV of the log up to ``length`` (but for the last token)."""
        self._ingested = max(self._ingested, length)

    def sealed(self) -> None:
        self.relay_sealed = True
        self.seal_deadline = None

    def resume_relay(self, relay: Holder, log_ids: Sequence[int]) -> None:
        """There is no main to take over: the sealed relay proposes again, from the end of the log, and past its limit."""
        self.relay_sealed = False
        self._relay_limit = None
        relay.stream.ingest(len(log_ids), (), decode=True)

    def relay_gone(self) -> None:
        self.relay_sealed = False
        self.seal_deadline = None

    def main_reset(self) -> None:
        """Main's part is free, or another attach has taken it that has nothing of the log yet."""
        self._sent = self._ingested = 0
        self._mode = None
        self._behind_before = None
        self.committed = False

    def main_opened_with(self, log_ids: Sequence[int]) -> None:
        """Main was opened with the log as it stands and decodes by itself."""
        if self._timeline.tokens["relay"] > 0 and self._timeline.handoff_done_s is None:
            self._begin(self._mode or "one_shot")
        self._sent = self._ingested = len(log_ids)
        self.committed = True
        self.seal_deadline = None

    def _begin(self, mode: HandoffMode) -> None:
        self._timeline.handoff = mode
        if self._timeline.handoff_start_s is None:
            self._timeline.handoff_start_s = self._timeline.now_s()

    def _commit(self, main: Holder, log_ids: Sequence[int]) -> None:
        main.stream.ingest(self._sent, log_ids[self._sent :], decode=True)
        self._sent = len(log_ids)
        self.committed = True
        self.seal_deadline = None
