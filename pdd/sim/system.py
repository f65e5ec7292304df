"""The life of a request under the virtual clock, with the decisions of the live system's policies and the order of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import simpy

from pdd.policy.alignment import HitWindow
from pdd.policy.completion import CompletionSnapshot, choose_completion
from pdd.policy.estimates import Lateness
from pdd.policy.lengths import LengthEstimator
from pdd.policy.link import LinkSnapshot
from pdd.policy.link_queue import LinkQueue
from pdd.policy.link_schedule import Priority
from pdd.policy.local import LocalQuota
from pdd.policy.pipeline import Pipeline, PipelineDecision, PipelineSnapshot, choose_pipeline
from pdd.sim.goodput import SeenRate
from pdd.sim.handoff import Handoff
from pdd.sim.link import Transfer, make_link
from pdd.sim.prefill import PrefillJob
from pdd.sim.request import Outcome, Request
from pdd.sim.server import Host, Later, Steps, begin, either
from pdd.sim.spec import SystemSpec
from pdd.sim.workers import Fleet, Worker, num_running


@dataclass(eq=False, slots=True)
class _Run:
    """What a request holds while it runs. ``ordered_s``: when its KV for main was."""

    request: Request
    arrived_s: float
    prefill: Worker
    main: Worker
    relay: Worker | None
    main_hit: int
    prefill_hit: int
    prefilled: simpy.Event
    arrival: Later
    at_main: bool = True
    job: PrefillJob | None = None
    ordered_s: float | None = None
    pushes: bool = False
    transfer: Transfer | None = None
    kv_bytes: float = 0.0

    @property
    def pair(self) -> tuple[str, str]:
        return self.prefill.name, self.main.name

    @property
    def tokens(self) -> int:
        """Of the prompt, whose KV is needed: all but the last, which the decode worker computes."""
        return self.request.prompt.num_tokens - 1


class System:
    """``submit`` a request and it runs; ``ended`` is told of each."""

    def __init__(self, env: simpy.Environment, spec: SystemSpec) -> None:
        self.env = env
        self.spec = spec
        host = self._host = None if spec.host is None else Host(spec.host)
        self.prefill = Fleet(env, "prefill", spec.prefill, host, spec.jitter)
        self.main = Fleet(env, "main", spec.main, host, spec.jitter)
        self.relay = None if spec.relay is None else Fleet(env, "relay", spec.relay, host, spec.jitter)
        self.link = make_link(env, spec.link)
        self._goodput_bytes_s = (spec.link.flow_bytes_s or spec.link.rate_bytes_s) / spec.link.coded_share  # of one transfer alone
        self._traffic = LinkQueue(spec.link.schedule)  # as a coordinator tells what is under way
        self._under_way: Counter[tuple[str, str]] = Counter()  # transfers, by prefill and main
        self._seen = SeenRate(lambda: env.now, lambda: self.link.busy, spec.link.rtt_s + spec.overheads.link_s)
        self.link.on_busy = self._link_changed
        self._num_pushes = 0
        if host is not None:
            host.watch("link", lambda: self.link.busy)
            host.watch("push", lambda: self._num_pushes > 0)
            host.watch("far", lambda: spec.link.rtt_s > 0 and any(worker.engine.num_jobs for worker in self.main.workers))
        policy = spec.policy
        lengths = policy.lengths
        self._lengths = LengthEstimator(lengths.quantile, lengths.min_samples, lengths.half_life, lengths.max_tenants)
        self._local = LocalQuota(policy.local.max_share, policy.local.window)
        self.hits = HitWindow(policy.alignment.window, policy.alignment.window_s)
        self._handoff = Handoff(env, policy, spec.link.rtt_s)
        self._forced: Pipeline | None = None if policy.pipeline == "auto" else policy.pipeline
        if spec.rule == "direct":
            self._forced = "direct"
        self._late = Lateness(policy.lateness_half_life_s, policy.max_lateness_s)
        self._background = 0
        self._background_bytes = 0.0
        self.num_running = 0

    @property
    def relay_load(self) -> float:
        """Share of the relays' rows in use."""
        if self.relay is None:
            return 0.0
        return num_running(self.relay.workers) / sum(worker.spec.max_rows for worker in self.relay.workers)

    def _link_changed(self) -> None:
        self._seen.look()
        if self._host is not None:
            self._host.look()

    def submit(self, request: Request, ended: Callable[[Outcome], None]) -> None:
        begin(self._life(request, ended))

    # --- the life of a request

    def _life(self, request: Request, ended: Callable[[Outcome], None]) -> Steps:
        arrived_s = self.env.now
        self.num_running += 1
        main = self.main.route(request.prompt)
        main.held += 1
        room = main.rows.take()
        if room is not None:
            yield room  # nothing is prefilled before main has room
        prefill = self.prefill.route(request.prompt)
        relay = None if self.relay is None else self.relay.route(request.prompt)
        run = _Run(request, arrived_s, prefill, main, relay, *self._hits(request, prefill, main), self.env.event(), Later(self.env))
        # Main says what it holds, and decides by that; a relay that may be used says so sooner, and prefill starts with it.
        steps = self.spec.overheads.reserve_steps
        answer_s = self.spec.link.rtt_s + main.busy_s(steps)
        early_s = answer_s
        if relay is not None and self._forced != "direct" and not self._full(relay):
            early_s = min(answer_s, relay.busy_s(steps))
        if early_s:
            yield self.env.timeout(early_s)
        self._prefill(run)
        if answer_s > early_s:
            yield self.env.timeout(answer_s - early_s)
        decision = self._decide(run)
        if decision.pipeline == "direct":
            self._push_ends(run)
            run.relay = None
        elif run.relay is not None:
            run.relay.held += 1
        if decision.pipeline == "local" or (decision.pipeline == "relay" and self.spec.rule == "relay_to_end"):
            self._leave_main(run)
        else:
            self._send_to_main(run, decision.push_priority)
        if run.relay is None:
            yield from self._direct(run, decision, ended)
        else:
            yield from self._relayed(run, decision, ended)
        self.num_running -= 1

    def _hits(self, request: Request, prefill: Worker, main: Worker) -> tuple[int, int]:
        """Tokens that main and prefill hold of the prompt."""
        need = request.prompt.num_tokens - 1
        if request.hits is not None:
            return min(need, request.hits[1]), min(need, request.hits[0])
        return min(need, main.cache.hit_tokens(request.prompt.chain)), min(need, prefill.cache.hit_tokens(request.prompt.chain))

    def _full(self, relay: Worker) -> bool:
        return relay.held >= relay.spec.max_rows and self.spec.rule != "relay_to_end"  # that one lets requests wait for the relay

    def _decide(self, run: _Run) -> PipelineDecision:
        request, prefill, relay = run.request, run.prefill, run.relay
        need = run.tokens
        miss = need - run.prefill_hit
        blind = self.spec.rule == "relay_to_end"  # it looks at the link alone
        link, main_miss = self._link_snapshot(self._under_way[run.pair]), need - run.main_hit
        self._traffic.advance(self.env.now, link.goodput_bytes_s)
        alone_s = prefill.spec.cost.prefill(miss, run.prefill_hit, prefill.spec.step_tokens) / miss if miss else None
        snapshot = PipelineSnapshot(
            main_miss_tokens=main_miss,
            kv_bytes_per_token=round(self.spec.kv_bytes_per_token),
            goodput_bytes_s=self._goodput_bytes_s * self._seen.share,
            rtt_s=self.spec.link.rtt_s,
            relay="none" if relay is None else "full" if self._full(relay) else "available",
            relay_running=0 if relay is None or blind else relay.held,
            relay_capacity=0 if relay is None else relay.spec.max_rows,
            link=link,
            ahead_bytes=self._traffic.ahead_bytes(main_miss * self.spec.kv_bytes_per_token, Priority.URGENT),
            prefill_tokens=miss,
            prefill_s_per_token=alone_s if prefill.pace.value is None else prefill.pace.value,
            prefill_step_tokens=prefill.spec.step_tokens,
            relay_s_per_token=None if relay is None else relay.step_s(need),
            output=self._lengths.predict(request.tenant, request.max_tokens),
            local_open=self._local.open,
            late_s=self._late.value_s(self.env.now),
        )
        decision = choose_pipeline(snapshot, self._forced, self.spec.policy)
        self._local.record(decision.pipeline == "local")
        self.hits.observe(self.env.now, need, run.prefill_hit if need > run.main_hit else None, run.main_hit)
        return decision

    def _link_snapshot(self, num: int) -> LinkSnapshot:
        """As one sending end measures it towards one receiver: what its ``num`` transfers get together, one more of them included."""
        return LinkSnapshot(
            goodput_bytes_s=min(self.link.rate_bytes_s, self._goodput_bytes_s * (num + 1)) * self._seen.share,
            round_trip_s=self.spec.link.rtt_s,
            queued_bytes=round(self.link.queued_bytes),
            num_transfers=num,
        )

    def _prefill(self, run: _Run) -> None:
        """``run.prefilled`` succeeds when the prompt's KV is at prefill. Callbacks, not a process: requests are many."""
        if run.tokens == run.main_hit:
            run.prefilled.succeed()
            return
        worker, miss, began_s = run.prefill, run.tokens - run.prefill_hit, self.env.now
        worker.held += 1
        run.pushes = run.relay is not None and self._forced != "direct"
        self._num_pushes += run.pushes

        def done() -> None:
            self._push_ends(run)
            worker.pace.observe(self.env.now - began_s, miss)
            worker.held -= 1
            worker.cache.put(run.request.prompt.chain)
            run.prefilled.succeed()

        # What a step computed goes when it has ended.
        hit_s = self.spec.overheads.hit_s if run.prefill_hit else 0.0
        job = worker.prefill.add(miss, run.prefill_hit, lambda tokens: self._send(run, min(tokens, job.behind - run.main_hit)), done, hit_s)
        run.job = job
        if self._host is not None:
            self._host.look()

    def _push_ends(self, run: _Run) -> None:
        if run.pushes:
            self._num_pushes -= 1
            run.pushes = False
            if self._host is not None:
                self._host.look()

    def _send_to_main(self, run: _Run, priority: Priority) -> None:
        """``run.arrival`` succeeds when what main lacked is at main: what prefill has goes at once, the rest as it is computed."""
        lacks = run.tokens - run.main_hit
        if lacks == 0:
            run.arrival.succeed()
            return
        assert run.job is not None
        run.kv_bytes = lacks * self.spec.kv_bytes_per_token
        run.ordered_s = self.env.now
        run.transfer = self.link.open(run.kv_bytes, lambda: self._sent(run), priority)
        self._traffic.add(run, run.kv_bytes, priority)
        self._under_way[run.pair] += 1
        self._send(run, run.job.behind - run.main_hit)

    def _sent(self, run: _Run) -> None:
        overheads = self.spec.overheads
        link_s = overheads.link_busy_s if run.main.engine.num_jobs else overheads.link_s
        run.arrival.succeed_in(self.spec.link.rtt_s / 2 + link_s)
        self._ends_sending(run)

    def _ends_sending(self, run: _Run) -> None:
        self._traffic.remove(run)
        self._under_way[run.pair] -= 1

    def _send(self, run: _Run, tokens: int) -> None:
        """Tokens of the prompt that main lacks and prefill has; none for those that main holds."""
        if run.transfer is not None and tokens > 0:
            self.link.feed(run.transfer, tokens * self.spec.kv_bytes_per_token)

    def _direct(self, run: _Run, decision: PipelineDecision, ended: Callable[[Outcome], None]) -> Steps:
        yield run.arrival
        if decision.predicted_kv_s is not None and run.ordered_s is not None:
            took_s = self.env.now + self.spec.link.rtt_s / 2 - run.ordered_s
            self._late.observe(self.env.now, took_s - decision.predicted_kv_s + decision.late_s)
        job, first_step_s = run.main.decode(run.request.output_tokens, self._context(run), self.spec.overheads.arrive_steps)
        first_s = self.env.now + first_step_s + self.spec.link.rtt_s / 2 + self.spec.overheads.main_s
        yield job.done
        self._keep_at_main(run)
        self._leave_main(run)
        self._end(run, decision, ended, first_s, run.main.step_s(run.tokens), 0, run.request.output_tokens, None)

    def _relayed(self, run: _Run, decision: PipelineDecision, ended: Callable[[Outcome], None]) -> Steps:
        relay = run.relay
        assert relay is not None
        room = relay.rows.take()
        if room is not None:
            yield room
        yield run.prefilled
        last_tokens = min(run.prefill.spec.step_tokens, run.tokens - run.prefill_hit)  # what came before went while prefill computed
        yield self.env.timeout(last_tokens * self.spec.kv_bytes_per_token / self.spec.local_bytes_s)
        job, first_step_s = relay.decode(run.request.output_tokens, self._context(run), self.spec.overheads.arrive_steps)
        first_s = self.env.now + first_step_s + self.spec.overheads.relay_s
        gap_s = relay.step_s(run.tokens)
        if not run.at_main:
            yield job.done
        else:
            yield either(self.env, job.done, run.arrival)
        if not job.active:
            relay.rows.leave()
            relay.held -= 1
            if run.at_main:
                self._ended_on_relay(run)
            self._end(run, decision, ended, first_s, gap_s, run.request.output_tokens, 0, None)
            return
        over = yield from self._handoff.hand_over(run.main, relay, job, run.request.output_tokens, self._context(run))
        relay.rows.leave()
        relay.held -= 1
        left = run.request.output_tokens - over.relayed
        if left > 0:
            yield (over.main or run.main.decode(left, self._context(run))[0]).done
        elif over.main is not None:
            run.main.engine.cancel(over.main)
        self._keep_at_main(run)
        self._leave_main(run)
        self._end(run, decision, ended, first_s, over.gap_s, over.relayed, left, over.mode)

    def _ended_on_relay(self, run: _Run) -> None:
        """Main's KV has yet to come: it goes on for its prefix alone, or is stopped."""
        lacks = run.tokens - run.main_hit
        snapshot = CompletionSnapshot(
            miss_tokens=lacks,
            num_bytes=round(lacks * self.spec.kv_bytes_per_token),
            gap=self.hits.rates(self.env.now).gap,
            num_running=self._background,
            running_bytes=round(self._background_bytes),
            link=self._link_snapshot(self.link.num_transfers),
            main_running=run.main.engine.num_jobs,
            main_capacity=run.main.spec.max_rows,
            begun=run.transfer is not None,
        )
        if choose_completion(snapshot, self.spec.policy.background).complete:
            begin(self._complete(run))
        else:
            self._stop_sending(run)
            self._leave_main(run)

    def _complete(self, run: _Run) -> Steps:
        self._background += 1
        self._background_bytes += run.kv_bytes
        if run.transfer is not None:
            self.link.put_off(run.transfer)
            self._traffic.set_priority(run, Priority.BACKGROUND)
        yield either(self.env, run.arrival, self.env.timeout(self.spec.policy.background.deadline_s))
        self._background -= 1
        self._background_bytes -= run.kv_bytes
        if run.arrival.processed:
            run.main.cache.put(run.request.prompt.chain)
        else:
            self._stop_sending(run)
        self._leave_main(run)

    def _stop_sending(self, run: _Run) -> None:
        if run.transfer is not None and run.transfer.active:
            self.link.cancel(run.transfer)
            self._ends_sending(run)

    # --- ends

    def _context(self, run: _Run) -> float:
        """Tokens that a row reads per step, on average over its answer."""
        return run.request.prompt.num_tokens + run.request.output_tokens / 2

    def _keep_at_main(self, run: _Run) -> None:
        run.main.cache.put((run.request.answer or run.request.prompt).chain)

    def _leave_main(self, run: _Run) -> None:
        if run.at_main:
            run.main.rows.leave()
            run.main.held -= 1
            run.at_main = False

    def _end(
        self,
        run: _Run,
        decision: PipelineDecision,
        ended: Callable[[Outcome], None],
        first_s: float,
        gap_s: float,
        relayed: int,
        main: int,
        handoff: str | None,
    ) -> None:
        request = run.request
        self._lengths.observe(request.tenant, request.output_tokens, request.output_tokens >= request.max_tokens)
        ended(
            Outcome(
                request=request,
                decision=decision,
                handoff=handoff,
                ttft_s=first_s - run.arrived_s,
                e2e_s=max(self.env.now, first_s) - run.arrived_s,
                largest_gap_s=gap_s,
                relay_tokens=relayed,
                main_tokens=main,
                prefill_hit=run.prefill_hit,
                main_hit=run.main_hit,
                kv_bytes=run.kv_bytes,
            )
        )
