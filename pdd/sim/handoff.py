"""From relay to main under the virtual clock, in the mode that the live policy chooses."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import simpy

from pdd.policy.handoff_choice import HandoffChoiceRules, HandoffChoiceSnapshot, choose_handoff
from pdd.policy_config import PolicyConfig
from pdd.sim.server import Job, either
from pdd.sim.workers import Worker


@dataclass(frozen=True)
class HandedOver:
    """``relayed``: tokens that the relay made · ``gap_s``: the largest between two tokens of the reader's · ``main``: decodes already."""

    mode: str
    gap_s: float
    relayed: int
    main: Job | None = None


class Handoff:
    """``rtt_s``: between coordinator and main."""

    def __init__(self, env: simpy.Environment, policy: PolicyConfig, rtt_s: float) -> None:
        rules = policy.handoff_rules
        self._env = env
        self._forced = None if policy.handoff == "auto" else policy.handoff
        self._choice = HandoffChoiceRules(policy.catch_up_chunk, rules.crowded_share, rules.crowded_gap_s, rules.hidden_itls)
        self._rules = rules
        self._chunk = policy.catch_up_chunk
        self._rtt_s = rtt_s

    def hand_over(
        self, main: Worker, relay: Worker, job: Job, output_tokens: int, context: float
    ) -> Generator[simpy.Event, object, HandedOver]:
        """Main has the prompt's KV. It is given the log and takes over from ``job``, of ``output_tokens`` in all."""
        yield self._env.timeout(self._rtt_s / 2)  # the coordinator is told
        backlog = max(1, int(relay.engine.got(job)))
        itl_s, main_s, cost = relay.step_s(0), main.step_s(context), main.spec.cost
        snapshot = HandoffChoiceSnapshot(
            backlog_tokens=backlog,
            relay_running=relay.engine.num_jobs,
            relay_capacity=relay.spec.max_rows,
            relay_stops_by_itself=False,
            rtt_s=self._rtt_s,
            main_is_alone=main.engine.num_jobs == 0,
            extend_s_per_token=cost.extend_token_s,
            main_itl_s=main_s,
            steady_itl_s=max(itl_s, main_s),
        )
        mode = choose_handoff(self._forced, snapshot, self._choice).mode
        slowdown = main_s / cost.step(main.engine.num_jobs + 1, main.engine.weight + context)

        def sealed() -> int:
            return min(output_tokens, max(1, round(relay.engine.cancel(job))))

        if mode == "one_shot":
            relayed = sealed()
            delay_s = self._rtt_s + slowdown * cost.extend(backlog)
            yield self._env.timeout(delay_s)
            return HandedOver(mode, max(itl_s, delay_s), relayed)
        # The relay runs on while main catches up; what is left behind then is a chunk at most.
        catching_up_s = self._rtt_s + slowdown * cost.extend(backlog - self._chunk) if backlog > self._chunk else 0.0
        if catching_up_s:
            yield either(self._env, job.done, self._env.timeout(catching_up_s))
        behind = min(self._chunk, max(1, int(relay.engine.got(job)) - max(0, backlog - self._chunk)))
        delay_s = self._rtt_s + slowdown * cost.extend(behind)
        if mode == "catch_up":
            relayed = sealed()
            yield self._env.timeout(delay_s)
            return HandedOver(mode, max(itl_s, delay_s), relayed)
        # Both decode until what the reader has yet to see, who gets it slower, outlasts main's delay.
        beside = main.decode(max(1, output_tokens - int(relay.engine.got(job))), context)[0]
        late_s = self._rtt_s + main.step_s(context)
        covered_s = min(late_s / max(1e-9, self._rules.pace - 1), self._rules.max_tokens * itl_s)
        yield either(self._env, job.done, self._env.timeout(delay_s + covered_s))
        return HandedOver(mode, self._rules.pace * itl_s, sealed(), beside)
