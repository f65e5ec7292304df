"""One request's state while it runs: who holds what for it, what was accepted of it, and what all requests share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pdd.config import LaunchConfig
from pdd.serving.acceptor import Acceptor
from pdd.serving.background import Background
from pdd.serving.handoff_figures import HandoffFigures
from pdd.serving.handoff_run import HandoffRun
from pdd.serving.holders import Holder, Holders
from pdd.serving.learned import Learned
from pdd.serving.link_estimate import LinkEstimate
from pdd.serving.link_traffic import LinkTraffic
from pdd.serving.metrics import Metrics
from pdd.serving.prefill_run import PrefillRun
from pdd.serving.request import GenerationRequest
from pdd.serving.shared_prompts import PromptShare, SharedPrompts
from pdd.serving.timeline import TimelineRecorder
from pdd.serving.worker_pool import WorkerPool

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunContext:
    """What all requests of a coordinator share. ``granted``: to be told the id of a request that main has given its pages, or that needs
    none.
    """

    config: LaunchConfig
    pool: WorkerPool
    links: LinkEstimate
    metrics: Metrics
    prompts: SharedPrompts
    learned: Learned
    background: Background
    traffic: LinkTraffic
    granted: Callable[[str], None]
    figures: HandoffFigures = field(default_factory=HandoffFigures)


@dataclass(eq=False)
class RequestParts:
    """``main``, ``relay``, ``prefill``: None before they are chosen and once they have no further part · ``awaits_shared``: it relays, and
    main is opened when another request's KV is there · ``local_limit``: it is finished on the relay, unless its log gets longer than that;
    None: it is not, or no longer · ``main_asked``: main has said what it holds of the prompt · ``looked_up``: that was counted, beside what
    prefill holds · ``prefilled_tokens``: that prefill computed of the prompt · ``goes_on``: it has ended, and main's transfer goes on in
    the background · ``deferred``: main's transfer runs in the lowest class, as the request is to end on the relay before.
    """

    request: GenerationRequest
    context: RunContext
    acceptor: Acceptor
    timeline: TimelineRecorder
    holders: Holders
    handoff: HandoffRun
    share: PromptShare
    main: Holder | None = None
    relay: Holder | None = None
    prefill: PrefillRun | None = None
    awaits_shared: bool = False
    local_limit: float | None = None
    main_asked: bool = False
    looked_up: bool = False
    prefilled_tokens: int | None = None
    goes_on: bool = False
    deferred: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    def advance(self) -> None:
        """Take the handoff as far as it can go now."""
        if self.main is not None and self.main.kv_here and self.acceptor.finish_reason is None:
            self.handoff.advance(self.main, self.relay, self.acceptor.log.ids)

    def kv_arrived(self, holder: Holder) -> None:
        """``holder`` has the prompt's KV: those who wait for the same prompt there are told."""
        holder.kv_here = True
        now = self.timeline.now_s()
        if holder is self.relay:
            self.share.kv_at_relay(holder.worker.name)
            if self.timeline.relay_kv_s is None:
                self.timeline.relay_kv_s = now
        if holder is self.main:
            self.share.kv_at_main(holder.worker.name)
            if self.timeline.main_kv_s is None:
                self.timeline.main_kv_s = now
            self.advance()

    def count_look_up(self, computed_tokens: int | None) -> None:
        """Main has said what it holds of the prompt, and so has prefill if it was to be asked. Counted once."""
        if self.main_asked and not self.looked_up:
            self.looked_up = True
            self.context.learned.looked_up(self.prompt_tokens, self.timeline.main_hit_tokens, computed_tokens)

    def count_fallback(self, reason: str, cause: str) -> None:
        self.timeline.fallbacks += 1
        self.context.metrics.fallbacks.labels(reason).inc()
        _log.warning("request %s: fallback %s after %d tokens: %s", self.request.request_id, reason, len(self.acceptor.log), cause)
