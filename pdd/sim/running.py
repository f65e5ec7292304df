"""What a request holds while it runs under the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdd.policy.pipeline import RelayState
from pdd.sim.link import Transfer
from pdd.sim.prefill import PrefillJob
from pdd.sim.request import Outcome, Request
from pdd.sim.server import Job, Later
from pdd.sim.workers import Worker


@dataclass(eq=False, slots=True)
class Running:
    """``tokens``: of the prompt, whose KV is needed: all but the last, which the decode worker computes · ``arrival``: of what main lacked
    · ``relay``: one that was asked and is not let go of, with ``relay_state`` and the requests on it, ``relay_running``, when it was asked
    · ``has_row``: on the relay, where it decodes as ``row``, its first token with the reader at ``first_s`` · ``relay_kv``: comes when the
    relay has the prompt's KV · ``decided``: main has answered · ``over``: the request has ended · ``began_s``: when prefill did ·
    ``ordered_s``: when its KV for main was.
    """

    request: Request
    ended: Callable[[Outcome], None]
    arrived_s: float
    prefill: Worker
    main: Worker
    tokens: int
    main_hit: int
    prefill_hit: int
    arrival: Later
    relay_kv: Later
    relay: Worker | None = None
    relay_state: RelayState = "none"
    relay_running: int = 0
    relay_capacity: int = 0
    relay_hit: int = 0
    has_row: bool = False
    row: Job | None = None
    first_s: float = 0.0
    gap_s: float = 0.0
    decided: bool = False
    over: bool = False
    at_main: bool = True
    job: PrefillJob | None = None
    began_s: float = 0.0
    ordered_s: float | None = None
    pushes: bool = False
    transfer: Transfer | None = None
    kv_bytes: float = 0.0

    @property
    def pair(self) -> tuple[str, str]:
        return self.prefill.name, self.main.name

    @property
    def main_miss(self) -> int:
        return self.tokens - self.main_hit

    @property
    def relay_miss(self) -> int:
        return self.tokens - self.relay_hit

    @property
    def context(self) -> float:
        """Tokens that a row reads per step, on average over its answer."""
        return self.request.prompt.num_tokens + self.request.output_tokens / 2

    @property
    def waits_for_kv(self) -> bool:
        """On a relay, whose KV prefill has yet to bring."""
        return self.relay is not None and not self.relay_kv.triggered
