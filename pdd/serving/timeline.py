"""Stamps what happens to one request on the monotonic clock and makes its Timeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdd.policy.outcomes import TransferEnd
from pdd.policy.pipeline import PipelineDecision
from pdd.serving.request import Origin, Timeline


@dataclass
class TimelineRecorder:
    """``clock``: seconds, monotonic. All ``*_s`` attributes are seconds since construction, None until they happen, but for
    ``kv_s``: from the start of prefill until main had its KV. ``transfer``, ``transfer_reason``: see
    :mod:`pdd.policy.outcomes` and :mod:`pdd.policy.completion`. ``redecision``: why the pipeline was changed after all.
    ``handoff_gap_s``: the largest between two delivered tokens, from the start of the handoff to main's first · ``handoff_cover_s``,
    ``handoff_left_s``: for how long the reader was supplied when the relay was asked to stop, and when main's first token was there.
    """

    clock: Callable[[], float] = time.monotonic
    decision: PipelineDecision | None = None
    handoff: str | None = None
    tokens: dict[Origin, int] = field(default_factory=lambda: {"relay": 0, "main": 0})
    wan_kv_bytes: int = 0
    wan_kv_wire_bytes: int = 0
    wan_kv_tokens: int = 0
    main_hit_tokens: int = 0
    main_prefill_tokens: int = 0
    prefill_start_s: float | None = None
    prefill_done_s: float | None = None
    relay_kv_s: float | None = None
    main_kv_s: float | None = None
    handoff_start_s: float | None = None
    handoff_done_s: float | None = None
    ttft_s: float | None = None
    second_token_s: float | None = None
    max_itl_s: float | None = None
    fallbacks: int = 0
    kv_s: float | None = None
    ended_on: Origin | None = None
    transfer: TransferEnd = "none"
    transfer_reason: str = ""
    wan_kv_saved_bytes: int = 0
    redecision: str = ""
    handoff_reason: str = ""
    handoff_predicted_gap_s: float | None = None
    handoff_gap_s: float | None = None
    handoff_cover_s: float | None = None
    handoff_left_s: float | None = None
    handoff_duplicates: int = 0
    handoff_rewinds: int = 0

    def __post_init__(self) -> None:
        self._received = self.clock()
        self._last_token_s: float | None = None
        self._handed_over = False

    def now_s(self) -> float:
        return self.clock() - self._received

    def accepted(self, origin: Origin) -> None:
        """A token is in the log."""
        self.tokens[origin] += 1
        self.ended_on = origin

    def delivered(self, origin: Origin) -> float | None:
        """A token goes to the reader. Returns the time since the one before, None for the first."""
        now = self.now_s()
        gap = None if self._last_token_s is None else now - self._last_token_s
        if self.ttft_s is None:
            self.ttft_s = now
        elif self.second_token_s is None:
            self.second_token_s = now
        if gap is not None:
            self.max_itl_s = gap if self.max_itl_s is None else max(self.max_itl_s, gap)
            if self.handoff_start_s is not None and not self._handed_over:
                self.handoff_gap_s = gap if self.handoff_gap_s is None else max(self.handoff_gap_s, gap)
                self._handed_over = origin == "main"
        self._last_token_s = now
        return gap

    def build(self) -> Timeline:
        """The Timeline as of now: ``e2e_s`` is the time of this call."""
        return Timeline(
            pipeline="" if self.decision is None else self.decision.pipeline,
            pipeline_reason="" if self.decision is None else self.decision.text,
            handoff=self.handoff,
            relay_tokens=self.tokens["relay"],
            main_tokens=self.tokens["main"],
            wan_kv_bytes=self.wan_kv_bytes,
            wan_kv_wire_bytes=self.wan_kv_wire_bytes,
            wan_kv_tokens=self.wan_kv_tokens,
            main_hit_tokens=self.main_hit_tokens,
            main_prefill_tokens=self.main_prefill_tokens,
            prefill_done_s=self.prefill_done_s,
            relay_kv_s=self.relay_kv_s,
            main_kv_s=self.main_kv_s,
            handoff_start_s=self.handoff_start_s,
            handoff_done_s=self.handoff_done_s,
            ttft_s=self.ttft_s,
            second_token_s=self.second_token_s,
            e2e_s=self.now_s(),
            max_itl_s=self.max_itl_s,
            fallbacks=self.fallbacks,
            decision="" if self.decision is None else self.decision.reason,
            predicted_kv_s=None if self.decision is None else self.decision.predicted_kv_s,
            kv_s=self.kv_s,
            predicted_output_tokens=None if self.decision is None else self.decision.predicted_output_tokens,
            ended_on=self.ended_on or "",
            transfer=self.transfer,
            transfer_reason=self.transfer_reason,
            wan_kv_saved_bytes=self.wan_kv_saved_bytes,
            redecision=self.redecision,
            handoff_reason=self.handoff_reason,
            handoff_predicted_gap_s=self.handoff_predicted_gap_s,
            handoff_gap_s=self.handoff_gap_s,
            handoff_cover_s=self.handoff_cover_s,
            handoff_left_s=self.handoff_left_s,
            handoff_duplicates=self.handoff_duplicates,
            handoff_rewinds=self.handoff_rewinds,
        )
