"""From relay to main under the virtual clock, in the mode that the live policy chooses."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import simpy

from pdd.handoff_config import HandoffConfig
from pdd.policy.handoff import SURE, reader_interval_s
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
        steady_s = max(itl_s, main_s)
        snapshot = HandoffChoiceSnapshot(
            backlog_tokens=backlog,
            relay_running=relay.engine.num_jobs,
            relay_capacity=relay.spec.max_rows,
            relay_stops_by_itself=False,
            rtt_s=self._rtt_s,
            main_is_alone=main.engine.num_jobs == 0,
            extend_s_per_token=cost.extend_token_s,
            main_itl_s=main_s,
            steady_itl_s=steady_s,
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
        beside = main.decode(max(1, output_tokens - int(relay.engine.got(job))), context)[0]
        # Where main's tokens come slower, the relay's went to the reader no faster while the KV was under way.
        laid_by_s = backlog * (steady_s - itl_s)
        both_s = covering_s(self._rules, itl_s, steady_s, self._rtt_s + main.step_s(context), laid_by_s)
        yield either(self._env, job.done, self._env.timeout(delay_s + both_s))
        return HandedOver(mode, reader_interval_s(self._rules.pace, itl_s, steady_s), sealed(), beside)


def covering_s(rules: HandoffConfig, itl_s: float, steady_s: float, late_s: float, laid_by_s: float) -> float:
    """How long relay and main both decode, from main's first token on, until what the reader has yet to see outlasts main's delay,
    ``late_s``, as :func:`pdd.policy.handoff.next_action` asks: what was laid by before, and what each of the relay's tokens adds to it.
    """
    interval_s = reader_interval_s(rules.pace, itl_s, steady_s)
    lacks_s = late_s - SURE * interval_s - min(laid_by_s, late_s, rules.max_cover_s)
    gained_s = interval_s - itl_s
    tokens = 0 if lacks_s <= 0 else rules.max_tokens if gained_s <= 0 else min(rules.max_tokens, math.ceil(lacks_s / gained_s))
    return itl_s * max(1, tokens)  # main's delay is not known before it has proposed twice
