"""What was decided for a request beside what came of it, as one flat record. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# "none": nothing was left to send · "cut": it was never begun · "background": it goes on · "stopped"
TransferEnd = Literal["none", "cut", "background", "stopped"]


@dataclass(frozen=True)
class DecisionRecord:
    """``*_s`` are seconds; None: not predicted, or did not happen. ``outcome``: "stop", "length", "cancelled" or an error code.
    ``budget_s``: None where there is no bound, too · ``kv_s``: from the start of prefill until main had its KV · ``ended_on``: who proposed
    the last token · ``transfer``: what became of main's transfer · ``redecision``: why the pipeline was changed after all, empty if it was
    not · ``handoff_predicted_gap_s``: of a one-shot handoff · ``handoff_gap_s``: the largest that the reader had during the handoff.
    """

    request_id: str
    pipeline: str
    reason: str
    text: str
    predicted_kv_s: float | None
    predicted_wait_s: float | None
    budget_s: float | None
    predicted_relay_end_s: float | None
    predicted_output_tokens: int | None
    ttft_target_s: float | None
    outcome: str
    kv_s: float | None
    ttft_s: float | None
    e2e_s: float | None
    output_tokens: int
    relay_tokens: int
    handoff: str | None
    ended_on: str
    transfer: TransferEnd
    transfer_reason: str
    wan_kv_bytes: int
    wan_kv_saved_bytes: int
    redecision: str
    fallbacks: int
    handoff_reason: str = ""
    handoff_predicted_gap_s: float | None = None
    handoff_gap_s: float | None = None

    @property
    def kv_error_s(self) -> float | None:
        """Measured less predicted arrival of main's KV."""
        if self.kv_s is None or self.predicted_kv_s is None:
            return None
        return self.kv_s - self.predicted_kv_s

    @property
    def within_output(self) -> bool | None:
        """Whether the answer was no longer than predicted."""
        if self.predicted_output_tokens is None or self.outcome not in ("stop", "length"):
            return None
        return self.output_tokens <= self.predicted_output_tokens

    @property
    def within_target(self) -> bool | None:
        """Whether the first token came in time; None without a target, or without a token."""
        if self.ttft_target_s is None or self.ttft_s is None:
            return None
        return self.ttft_s <= self.ttft_target_s
