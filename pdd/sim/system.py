"""The life of a request under the virtual clock, with the decisions of the live system's policies and the order of its steps."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import simpy

from pdd.policy.alignment import HitWindow
from pdd.policy.completion import CompletionSnapshot, choose_completion
from pdd.policy.handoff_choice import HandoffChoiceRules, HandoffChoiceSnapshot, choose_handoff
from pdd.policy.lengths import LengthEstimator
from pdd.policy.link import LinkSnapshot
from pdd.policy.local import LocalQuota
from pdd.policy.pipeline import Pipeline, PipelineDecision, PipelineSnapshot, choose_pipeline
from pdd.sim.cache import Prompt
from pdd.sim.link import Transfer, make_link
from pdd.sim.server import Host, Job
from pdd.sim.spec import SystemSpec
from pdd.sim.workers import Fleet, Worker, num_running

Steps = Generator[simpy.Event, object, None]


@dataclass(frozen=True)
class Request:
    """``hits``: (prefill, main) tokens, where the workload states them instead of the caches · ``answer``: what the prompt with its answer
    is called in caches, None: nobody comes back to it.
    """

    tenant: str
    prompt: Prompt
    output_tokens: int
    max_tokens: int
    hits: tuple[int, int] | None = None
    answer: Prompt | None = None


@dataclass(frozen=True)
class Outcome:
    """Seconds from arrival. ``largest_gap_s``: between tokens, at the handoff or a decode step."""

    request: Request
    decision: PipelineDecision
    handoff: str | None
    ttft_s: float
    e2e_s: float
    largest_gap_s: float
    relay_tokens: int
    main_tokens: int
    prefill_hit: int
    main_hit: int
    kv_bytes: float


@dataclass
class _Run:
    """What a request holds while it runs."""

    request: Request
    arrived_s: float
    prefill: Worker
    main: Worker
    relay: Worker | None
    main_hit: int
    prefill_hit: int
    decision: PipelineDecision
    main_place: simpy.resources.resource.Request | None
    transfer: Transfer | None = None
    kv_bytes: float = 0.0

    @property
    def tokens(self) -> int:
        """Of the prompt, whose KV is needed: all but the last, which the decode worker computes."""
        return self.request.prompt.num_tokens - 1


class System:
    """``submit`` a request and it runs; ``ended`` is told of each."""

    def __init__(self, env: simpy.Environment, spec: SystemSpec) -> None:
        self.env = env
        self.spec = spec
        host = None if spec.host_cores is None else Host(spec.host_cores)
        self.prefill = Fleet(env, "prefill", spec.prefill, host)
        self.main = Fleet(env, "main", spec.main, host)
        self.relay = None if spec.relay is None else Fleet(env, "relay", spec.relay, host)
        self.link = make_link(env, spec.link.rate_bytes_s, spec.link.flow_bytes_s, spec.link.schedule)
        policy = spec.policy
        lengths = policy.lengths
        self._lengths = LengthEstimator(lengths.quantile, lengths.min_samples, lengths.half_life, lengths.max_tenants)
        self._local = LocalQuota(policy.local.max_share, policy.local.window)
        self.hits = HitWindow(policy.alignment.window, policy.alignment.window_s)
        self._rules = HandoffChoiceRules(
            policy.catch_up_chunk, policy.handoff_rules.crowded_share, policy.handoff_rules.crowded_gap_s, policy.handoff_rules.hidden_itls
        )
        self._forced: Pipeline | None = None if policy.pipeline == "auto" else policy.pipeline
        if spec.rule == "direct":
            self._forced = "direct"
        self._background = 0
        self._background_bytes = 0.0
        self.num_running = 0

    @property
    def relay_load(self) -> float:
        """Share of the relays' rows in use."""
        if self.relay is None:
            return 0.0
        return num_running(self.relay.workers) / sum(worker.spec.max_rows for worker in self.relay.workers)

    def submit(self, request: Request, ended: Callable[[Outcome], None]) -> simpy.Process:
        return self.env.process(self._life(request, ended))

    # --- the life of a request

    def _life(self, request: Request, ended: Callable[[Outcome], None]) -> Steps:
        arrived_s = self.env.now
        self.num_running += 1
        if self.spec.overhead_s:
            yield self.env.timeout(self.spec.overhead_s)
        main = self.main.route(request.prompt)
        main.held += 1
        place = main.rows.take()
        yield place  # nothing is prefilled before main has room
        prefill = self.prefill.route(request.prompt)
        relay = None if self.relay is None else self.relay.route(request.prompt)
        run = self._decide(request, arrived_s, prefill, main, relay, place)
        if run.decision.pipeline == "direct":
            run.relay = None
        elif run.relay is not None:
            run.relay.held += 1
        if run.decision.pipeline == "local" or (run.decision.pipeline == "relay" and self.spec.rule == "relay_to_end"):
            self._leave_main(run)
        prefilled, arrival = self.env.event(), self.env.event()
        self.env.process(self._prefill_and_send(run, prefilled, arrival))
        if run.relay is None:
            yield from self._direct(run, arrival, ended)
        else:
            yield from self._relayed(run, prefilled, arrival, ended)
        self.num_running -= 1

    def _decide(
        self,
        request: Request,
        arrived_s: float,
        prefill: Worker,
        main: Worker,
        relay: Worker | None,
        place: simpy.resources.resource.Request,
    ) -> _Run:
        need = request.prompt.num_tokens - 1
        if request.hits is None:
            prefill_hit = min(need, prefill.cache.hit_tokens(request.prompt.chain))
            main_hit = min(need, main.cache.hit_tokens(request.prompt.chain))
        else:
            prefill_hit, main_hit = (min(need, hit) for hit in request.hits)
        cost = prefill.spec.cost
        miss = need - prefill_hit
        blind = self.spec.rule == "relay_to_end"  # it looks at the link alone, and lets requests wait for the relay
        full = relay is not None and relay.held >= relay.spec.max_rows and not blind
        snapshot = PipelineSnapshot(
            main_miss_tokens=need - main_hit,
            kv_bytes_per_token=round(self.spec.kv_bytes_per_token),
            goodput_bytes_s=self.spec.link.flow_bytes_s or self.spec.link.rate_bytes_s,
            rtt_s=self.spec.link.rtt_s,
            relay="none" if relay is None else "full" if full else "available",
            relay_running=0 if relay is None or blind else relay.held,
            relay_capacity=0 if relay is None else relay.spec.max_rows,
            link=self._link_snapshot(),
            prefill_tokens=miss,
            prefill_s_per_token=cost.prefill(miss, prefill_hit) / miss if miss else None,
            prefill_step_tokens=prefill.spec.step_tokens,
            relay_s_per_token=None if relay is None else relay.step_s(need),
            output=self._lengths.predict(request.tenant, request.max_tokens),
            local_open=self._local.open,
        )
        decision = choose_pipeline(snapshot, self._forced, self.spec.policy)
        self._local.record(decision.pipeline == "local")
        self.hits.observe(self.env.now, need, prefill_hit if need > main_hit else None, main_hit)
        return _Run(request, arrived_s, prefill, main, relay, main_hit, prefill_hit, decision, place)

    def _link_snapshot(self) -> LinkSnapshot:
        """As the sending end measures it: what all transfers get together, one more of them included."""
        link = self.spec.link
        flows = link.rate_bytes_s if link.flow_bytes_s is None else link.flow_bytes_s * (self.link.num_transfers + 1)
        return LinkSnapshot(
            goodput_bytes_s=min(link.rate_bytes_s, flows),
            round_trip_s=self.spec.link.rtt_s,
            queued_bytes=round(self.link.queued_bytes),
            num_transfers=self.link.num_transfers,
        )

    def _prefill_and_send(self, run: _Run, prefilled: simpy.Event, arrival: simpy.Event) -> Steps:
        """``prefilled``: the prompt's KV is at prefill · ``arrival``: what main lacked of it is at main."""
        lacks = run.tokens - run.main_hit
        if lacks == 0:
            arrival.succeed()
            prefilled.succeed()
            return
        worker = run.prefill
        miss = run.tokens - run.prefill_hit
        worker.held += 1
        place = worker.rows.take()
        yield place
        work_s = worker.spec.cost.prefill(miss, run.prefill_hit)
        job = worker.engine.add(work_s)
        to_main = run.main_place is not None
        if to_main:
            if lacks <= miss:  # nothing to send before a step has ended
                first = min(1.0, worker.spec.step_tokens / miss)
                yield simpy.AnyOf(self.env, (job.done, self.env.timeout(work_s * first)))
            run.kv_bytes = lacks * self.spec.kv_bytes_per_token
            run.transfer = self.link.send(run.kv_bytes)
        yield job.done
        worker.rows.leave(place)
        worker.held -= 1
        worker.cache.put(run.request.prompt.chain)
        prefilled.succeed()
        if run.transfer is None:
            return
        last_bytes = min(worker.spec.step_tokens, miss, lacks) * self.spec.kv_bytes_per_token
        yield simpy.AllOf(
            self.env, (run.transfer.done, self.env.timeout(last_bytes / (self.spec.link.flow_bytes_s or self.spec.link.rate_bytes_s)))
        )
        yield self.env.timeout(self.spec.link.rtt_s)  # acknowledged, told
        arrival.succeed()

    def _direct(self, run: _Run, arrival: simpy.Event, ended: Callable[[Outcome], None]) -> Steps:
        yield arrival
        first_s = self.env.now + run.main.step_s(run.tokens) + self.spec.link.rtt_s / 2
        job = run.main.engine.add(run.request.output_tokens, self._context(run))
        yield job.done
        self._keep_at_main(run)
        self._leave_main(run)
        self._end(run, ended, first_s, run.main.step_s(run.tokens), 0, run.request.output_tokens, None)

    def _relayed(self, run: _Run, prefilled: simpy.Event, arrival: simpy.Event, ended: Callable[[Outcome], None]) -> Steps:
        relay = run.relay
        assert relay is not None
        place = relay.rows.take()
        yield place
        yield prefilled
        yield self.env.timeout((run.tokens - run.prefill_hit) * self.spec.kv_bytes_per_token / self.spec.local_bytes_s)
        first_s = self.env.now + relay.step_s(run.tokens)
        job = relay.engine.add(run.request.output_tokens, self._context(run))
        gap_s = relay.step_s(run.tokens)
        if run.main_place is None:
            yield job.done
        else:
            yield simpy.AnyOf(self.env, (job.done, arrival))
        if not job.active:
            relay.rows.leave(place)
            relay.held -= 1
            if run.main_place is not None:
                self._ended_on_relay(run, arrival)
            self._end(run, ended, first_s, gap_s, run.request.output_tokens, 0, None)
            return
        handoff, gap_s, relayed = yield from self._hand_over(run, relay, job)
        relay.rows.leave(place)
        relay.held -= 1
        left = run.request.output_tokens - relayed
        if left > 0:
            yield run.main.engine.add(left, self._context(run)).done
        self._keep_at_main(run)
        self._leave_main(run)
        self._end(run, ended, first_s, gap_s, relayed, left, handoff)

    def _hand_over(self, run: _Run, relay: Worker, job: Job) -> Generator[simpy.Event, object, tuple[str, float, int]]:
        """Main is given the log and takes over: (mode, largest gap, tokens that the relay made)."""
        extend = run.main.spec.cost
        backlog = max(1, int(relay.engine.got(job)))
        itl_s = relay.step_s(run.tokens)
        snapshot = HandoffChoiceSnapshot(
            backlog_tokens=backlog,
            relay_running=relay.engine.num_jobs,
            relay_capacity=relay.spec.max_rows,
            relay_stops_by_itself=False,
            rtt_s=self.spec.link.rtt_s,
            extend_s_per_token=extend.extend_token_s,
            relay_itl_s=itl_s,
            main_itl_s=run.main.step_s(run.tokens),
        )
        forced = None if self.spec.policy.handoff == "auto" else self.spec.policy.handoff
        mode = choose_handoff(forced, snapshot, self._rules).mode
        speed = run.main.step_s(run.tokens) / extend.step(run.main.engine.num_jobs + 1, run.main.engine.weight + run.tokens)
        delay_s = self.spec.link.rtt_s + speed * extend.extend(backlog)
        if mode == "one_shot":
            relayed = min(run.request.output_tokens, max(1, round(relay.engine.cancel(job))))
            yield self.env.timeout(delay_s)
            return mode, max(itl_s, delay_s), relayed
        # The relay runs on while main catches up; what is left behind then is a chunk at most.
        yield simpy.AnyOf(self.env, (job.done, self.env.timeout(delay_s)))
        relayed = min(run.request.output_tokens, max(1, round(relay.engine.cancel(job))))
        if mode == "overlap":
            return mode, itl_s, relayed
        gap_s = self.spec.link.rtt_s + speed * extend.extend(min(self.spec.policy.catch_up_chunk, relayed - backlog))
        yield self.env.timeout(gap_s)
        return mode, max(itl_s, gap_s), relayed

    def _ended_on_relay(self, run: _Run, arrival: simpy.Event) -> None:
        """Main's KV has yet to come: it goes on for its prefix alone, or is stopped."""
        lacks = run.tokens - run.main_hit
        snapshot = CompletionSnapshot(
            miss_tokens=lacks,
            num_bytes=round(lacks * self.spec.kv_bytes_per_token),
            gap=self.hits.rates(self.env.now).gap,
            num_running=self._background,
            running_bytes=round(self._background_bytes),
            link=self._link_snapshot(),
            main_running=run.main.engine.num_jobs,
            main_capacity=run.main.spec.max_rows,
            begun=run.transfer is not None,
        )
        if choose_completion(snapshot, self.spec.policy.background).complete:
            self.env.process(self._complete(run, arrival))
        else:
            if run.transfer is not None:
                self.link.cancel(run.transfer)
            self._leave_main(run)

    def _complete(self, run: _Run, arrival: simpy.Event) -> Steps:
        self._background += 1
        self._background_bytes += run.kv_bytes
        yield simpy.AnyOf(self.env, (arrival, self.env.timeout(self.spec.policy.background.deadline_s)))
        self._background -= 1
        self._background_bytes -= run.kv_bytes
        if arrival.triggered:
            run.main.cache.put(run.request.prompt.chain)
        elif run.transfer is not None:
            self.link.cancel(run.transfer)
        self._leave_main(run)

    # --- ends

    def _context(self, run: _Run) -> float:
        """Tokens that a row reads per step, on average over its answer."""
        return run.request.prompt.num_tokens + run.request.output_tokens / 2

    def _keep_at_main(self, run: _Run) -> None:
        run.main.cache.put((run.request.answer or run.request.prompt).chain)

    def _leave_main(self, run: _Run) -> None:
        if run.main_place is not None:
            run.main.rows.leave(run.main_place)
            run.main.held -= 1
            run.main_place = None

    def _end(
        self, run: _Run, ended: Callable[[Outcome], None], first_s: float, gap_s: float, relayed: int, main: int, handoff: str | None
    ) -> None:
        request = run.request
        self._lengths.observe(request.tenant, request.output_tokens, request.output_tokens >= request.max_tokens)
        ended(
            Outcome(
                request=request,
                decision=run.decision,
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
