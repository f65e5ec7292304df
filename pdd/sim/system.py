"""The life of a request under the virtual clock, with the decisions of the live system's policies and the order of its steps."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from pdd.policy.alignment import HitWindow
from pdd.policy.estimates import Lateness
from pdd.policy.lengths import LengthEstimator
from pdd.policy.link_schedule import Priority
from pdd.policy.local import LocalQuota
from pdd.policy.pipeline import RELAY_FIRST, Pipeline, PipelineDecision, PipelineSnapshot, choose_pipeline
from pdd.sim.background import Background
from pdd.sim.cache import beginning
from pdd.sim.handoff import Handoff
from pdd.sim.request import Outcome, Request
from pdd.sim.running import Running
from pdd.sim.sending import Sending
from pdd.sim.server import Host, Job, Later, Steps, begin, either, when
from pdd.sim.spec import SystemSpec
from pdd.sim.workers import Fleet, Worker, num_running

# Of a token: what adding up paces may be off by.
_ROUNDING = 1e-6


class System:
    """``submit`` a request and it runs; ``ended`` is told of each."""

    def __init__(self, env: simpy.Environment, spec: SystemSpec) -> None:
        self.env = env
        self.spec = spec
        host = self._host = None if spec.host is None else Host(spec.host)
        self.prefill = Fleet(env, "prefill", spec.prefill, host, spec.jitter)
        self.main = Fleet(env, "main", spec.main, host, spec.jitter)
        self.relay = None if spec.relay is None else Fleet(env, "relay", spec.relay, host, spec.jitter)
        self._sending = Sending(env, spec, self._look)
        self.link = self._sending.link
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
        self._background = Background(env, spec, self._sending, self.hits, self._leave_main)
        self.num_running = 0

    @property
    def relay_load(self) -> float:
        """Share of the relays' rows in use."""
        if self.relay is None:
            return 0.0
        return num_running(self.relay.workers) / sum(worker.spec.max_rows for worker in self.relay.workers)

    def _look(self) -> None:
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
        tokens = request.prompt.num_tokens - 1
        hits = self._hits(request, tokens, prefill, main)
        run = Running(request, ended, arrived_s, prefill, main, tokens, *hits, Later(self.env), Later(self.env))
        # Main says what it holds, and decides by that; a relay that may be used says so sooner, and prefill starts with it.
        steps = self.spec.overheads.reserve_steps
        answer_s = self.spec.link.rtt_s + main.busy_s(steps)
        left_s = answer_s
        relay = self._ask_relay(run)
        if relay is not None:
            relay_s = relay.busy_s(steps)
            left_s = max(answer_s, relay_s)
            if relay_s < answer_s:
                if relay_s:
                    yield self.env.timeout(relay_s)
                    left_s -= relay_s
                self._begin_early(run)
        if left_s:
            yield self.env.timeout(left_s)
        if run.over:
            return
        run.decided = True
        if run.row is not None and run.row.done.callbacks is not None:
            run.row.done.callbacks.clear()  # from now on main is waited for
        decision = self._decide(run)
        if decision.pipeline == "direct" and run.relay is not None:
            self._leave_relay(run, run.relay)
        if decision.pipeline == "local" or (decision.pipeline == "relay" and self.spec.rule == "relay_to_end"):
            self._leave_main(run)
        self._settle_prefill(run)
        if run.at_main:
            self._sending.begin(run, decision.push_priority)
        if run.relay is None:
            yield from self._direct(run, decision)
        else:
            yield from self._relayed(run, run.relay, decision)

    def _hits(self, request: Request, need: int, prefill: Worker, main: Worker) -> tuple[int, int]:
        """Tokens that main and prefill hold of the prompt, of those that are needed."""
        if request.hits is not None:
            return min(need, request.hits[1]), min(need, request.hits[0])
        return min(need, main.cache.hit_tokens(request.prompt.chain)), min(need, prefill.cache.hit_tokens(request.prompt.chain))

    def _ask_relay(self, run: Running) -> Worker | None:
        """Who was asked, and keeps a row for the run."""
        if self.relay is None or self._forced == "direct":
            return None
        relay = self.relay.route(run.request.prompt)
        blind = self.spec.rule == "relay_to_end"  # it looks at the link alone, and lets requests wait for the relay
        run.relay_running, run.relay_capacity = 0 if blind else relay.held, relay.spec.max_rows
        if relay.held >= relay.spec.max_rows and not blind:
            run.relay_state = "full"
            return None
        run.relay, run.relay_state = relay, "available"
        relay.held += 1
        run.has_row = relay.rows.take_free()
        if run.request.hits is None:  # stated ones say nothing of a relay, which then holds nothing
            run.relay_hit = min(run.tokens, relay.cache.hit_tokens(run.request.prompt.chain))
        assert run.relay_kv.callbacks is not None
        run.relay_kv.callbacks.append(lambda _: self._kv_at_relay(run, relay))
        return relay

    def _begin_early(self, run: Running) -> None:
        """The relay has reserved: prefill starts, for the relay alone as yet, while main's answer crosses the link."""
        if run.relay_miss:
            self._prefill(run)
        else:
            run.relay_kv.succeed_in(0.0)

    def _settle_prefill(self, run: Running) -> None:
        """It is known who gets the prompt's KV: whoever lacks some of it. Where nobody does, one that was begun early goes no further."""
        if run.waits_for_kv and run.relay_miss == 0:
            run.relay_kv.succeed_in(0.0)
        if (run.at_main and run.main_miss) or run.waits_for_kv:
            if run.job is None:
                self._prefill(run)
        elif run.job is not None and run.prefill.prefill.cancel(run.job):
            self._push_ends(run)
            run.prefill.held -= 1
            run.prefill.cache.put(beginning(run.request.prompt.chain, run.job.behind))

    def _decide(self, run: Running) -> PipelineDecision:
        request, prefill, relay = run.request, run.prefill, run.relay
        need = run.tokens
        miss = min(need - run.prefill_hit, run.main_miss, run.relay_miss)  # prefill holds what either has
        link = self._sending.towards(run)
        alone_s = prefill.spec.cost.prefill(miss, need - miss, prefill.spec.step_tokens) / miss if miss else None
        snapshot = PipelineSnapshot(
            main_miss_tokens=run.main_miss,
            kv_bytes_per_token=round(self.spec.kv_bytes_per_token),
            goodput_bytes_s=self._sending.goodput_bytes_s,
            rtt_s=self.spec.link.rtt_s,
            relay=run.relay_state,
            relay_running=run.relay_running,
            relay_capacity=run.relay_capacity,
            link=link,
            ahead_bytes=self._sending.ahead_bytes(run, link),
            prefill_tokens=miss,
            prefill_s_per_token=alone_s if prefill.pace.value is None else prefill.pace.value,
            prefill_step_tokens=prefill.spec.step_tokens,
            relay_s_per_token=None if relay is None else relay.step_s(need),
            output=self._lengths.predict(request.tenant, request.max_tokens),
            local_open=self._local.open,
            late_s=self._late.value_s(self.env.now),
            relayed_tokens=self._relayed_tokens(run),
        )
        decision = choose_pipeline(snapshot, self._forced, self.spec.policy)
        self._local.record(decision.pipeline == "local")
        self.hits.observe(self.env.now, need, run.prefill_hit if run.main_miss else None, run.main_hit)
        return decision

    def _relayed_tokens(self, run: Running) -> int:
        """That the reader has of the relay before main has answered: the one at the length limit waits for that."""
        if run.relay is None or run.row is None:
            return 0
        return min(int(run.relay.engine.got(run.row) + _ROUNDING), run.request.max_tokens - 1)

    def _prefill(self, run: Running) -> None:
        """For whoever waits for the prompt's KV. Callbacks, not a process: requests are many."""
        worker, miss = run.prefill, run.tokens - run.prefill_hit
        run.began_s = self.env.now
        worker.held += 1
        run.pushes = run.relay is not None and run.relay_miss > 0
        self._num_pushes += run.pushes

        def done() -> None:
            self._push_ends(run)
            took_s = self.env.now - run.began_s
            worker.pace.observe(took_s, miss)
            worker.held -= 1
            worker.cache.put(run.request.prompt.chain)
            if run.waits_for_kv:
                run.relay_kv.succeed_in(self._push_s(run, took_s))

        # What a step computed goes when it has ended.
        hit_s = self.spec.overheads.hit_s if run.prefill_hit else 0.0
        job = worker.prefill.add(
            miss, run.prefill_hit, lambda tokens: self._sending.feed(run, min(tokens, job.behind - run.main_hit)), done, hit_s
        )
        run.job = job
        self._look()

    def _push_s(self, run: Running, took_s: float) -> float:
        """From the end of prefill until the relay has everything: the last step's KV, or what did not leave while prefill computed."""
        last_tokens = min(run.prefill.spec.step_tokens, run.tokens - run.prefill_hit, run.relay_miss)
        token_s = self.spec.kv_bytes_per_token / self.spec.local_bytes_s
        return max(last_tokens * token_s, run.relay_miss * token_s - took_s)

    def _push_ends(self, run: Running) -> None:
        if run.pushes:
            self._num_pushes -= 1
            run.pushes = False
            self._look()

    def _kv_at_relay(self, run: Running, relay: Worker) -> None:
        if run.request.hits is None:
            relay.cache.put(run.request.prompt.chain)
        if run.has_row:
            self._relay_begins(run, relay)

    def _relay_begins(self, run: Running, relay: Worker) -> Job:
        request = run.request
        run.row, first_step_s = relay.decode(request.output_tokens, run.context, self.spec.overheads.arrive_steps)
        run.first_s, run.gap_s = self.env.now + first_step_s + self.spec.overheads.relay_s, relay.step_s(run.tokens)
        if not run.decided and request.output_tokens < request.max_tokens:
            when(run.row.done, lambda: self._ends_first(run, relay))
        return run.row

    def _ends_first(self, run: Running, relay: Worker) -> None:
        """The answer has stopped, main has yet to say what it holds, and nobody waits for that."""
        self._ended_on_relay(run, relay)
        self._leave_main(run)
        self._end(run, RELAY_FIRST, run.request.output_tokens, 0, run.gap_s, None)

    def _direct(self, run: Running, decision: PipelineDecision) -> Steps:
        yield run.arrival
        if decision.predicted_kv_s is not None and run.ordered_s is not None:
            took_s = self.env.now + self.spec.link.rtt_s / 2 - run.ordered_s
            self._late.observe(self.env.now, took_s - decision.predicted_kv_s + decision.late_s)
        job, first_step_s = run.main.decode(run.request.output_tokens, run.context, self.spec.overheads.arrive_steps)
        run.first_s = self.env.now + first_step_s + self.spec.link.rtt_s / 2 + self.spec.overheads.main_s
        yield job.done
        self._keep_at_main(run)
        self._leave_main(run)
        self._end(run, decision, 0, run.request.output_tokens, run.main.step_s(run.tokens), None)

    def _relayed(self, run: Running, relay: Worker, decision: PipelineDecision) -> Steps:
        output_tokens = run.request.output_tokens
        if not run.has_row:
            room = relay.rows.take()
            if room is not None:
                yield room
        yield run.relay_kv
        job = run.row or self._relay_begins(run, relay)
        if run.transfer is not None and run.transfer.priority is Priority.BACKGROUND:
            self._hurry_if_late(run, relay, job, decision)
        if not run.at_main:
            yield job.done
        else:
            yield either(self.env, job.done, run.arrival)
        if not job.active:
            self._ended_on_relay(run, relay)
            if run.at_main:
                self._background.ended(run)
            self._end(run, decision, output_tokens, 0, run.gap_s, None)
            return
        over = yield from self._handoff.hand_over(run.main, relay, job, output_tokens, run.context)
        relay.rows.leave()
        relay.held -= 1
        left = output_tokens - over.relayed
        if left > 0:
            yield (over.main or run.main.decode(left, run.context)[0]).done
        elif over.main is not None:
            run.main.engine.cancel(over.main)
        self._keep_at_main(run)
        self._leave_main(run)
        self._end(run, decision, over.relayed, left, over.gap_s, over.mode)

    def _hurry_if_late(self, run: Running, relay: Worker, job: Job, decision: PipelineDecision) -> None:
        """What goes to main was put off, as the relay is to end before. Once the answer, or the time that main's KV would have taken, is
        longer than predicted, main is waited for as behind any relay.
        """
        assert decision.predicted_kv_s is not None
        assert decision.predicted_output_tokens is not None
        wait_s = max(0.0, run.began_s + decision.predicted_kv_s - self.env.now)
        if run.request.output_tokens > decision.predicted_output_tokens:
            wait_s = min(wait_s, relay.engine.until(job, decision.predicted_output_tokens + 1))

        def late() -> None:
            if not run.over:
                self._sending.set_priority(run, Priority.NORMAL)

        when(self.env.timeout(wait_s), late)

    # --- ends

    def _keep_at_main(self, run: Running) -> None:
        run.main.cache.put((run.request.answer or run.request.prompt).chain)

    def _leave_main(self, run: Running) -> None:
        if run.at_main:
            run.main.rows.leave()
            run.main.held -= 1
            run.at_main = False

    def _ended_on_relay(self, run: Running, relay: Worker) -> None:
        relay.rows.leave()
        relay.held -= 1
        if run.request.hits is None:
            relay.cache.put((run.request.answer or run.request.prompt).chain)

    def _leave_relay(self, run: Running, relay: Worker) -> None:
        if run.row is not None:
            relay.engine.cancel(run.row)
        if run.has_row:
            relay.rows.leave()
        relay.held -= 1
        self._push_ends(run)
        run.relay, run.row = None, None
        if run.relay_kv.callbacks is not None:
            run.relay_kv.callbacks.clear()  # it does not begin

    def _end(
        self,
        run: Running,
        decision: PipelineDecision,
        relayed: int,
        main: int,
        gap_s: float,
        handoff: str | None,
    ) -> None:
        request = run.request
        run.over = True
        self._lengths.observe(request.tenant, request.output_tokens, request.output_tokens >= request.max_tokens)
        run.ended(
            Outcome(
                request=request,
                decision=decision,
                handoff=handoff,
                ttft_s=run.first_s - run.arrived_s,
                e2e_s=max(self.env.now, run.first_s) - run.arrived_s,
                largest_gap_s=gap_s,
                relay_tokens=relayed,
                main_tokens=main,
                prefill_hit=run.prefill_hit,
                main_hit=run.main_hit,
                kv_bytes=run.kv_bytes,
            )
        )
        self.num_running -= 1
