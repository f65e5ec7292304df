"""Transfers to main whose request has ended on the relay: under the virtual clock, by the live system's decision."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from pdd.policy.alignment import HitWindow
from pdd.policy.completion import CompletionSnapshot, choose_completion
from pdd.sim.running import Running
from pdd.sim.sending import Sending
from pdd.sim.server import Steps, begin, either
from pdd.sim.spec import SystemSpec


class Background:
    """``leave_main``: gives back what a run holds there."""

    def __init__(
        self, env: simpy.Environment, spec: SystemSpec, sending: Sending, hits: HitWindow, leave_main: Callable[[Running], None]
    ) -> None:
        self._env = env
        self._spec = spec
        self._sending = sending
        self._hits = hits
        self._leave_main = leave_main
        self._num_running = 0
        self._running_bytes = 0.0

    def ended(self, run: Running) -> None:
        """``run`` has, and main's KV has yet to come: it goes on for its prefix alone, or is stopped."""
        snapshot = CompletionSnapshot(
            miss_tokens=run.main_miss,
            num_bytes=round(run.main_miss * self._spec.kv_bytes_per_token),
            gap=self._hits.rates(self._env.now).gap,
            num_running=self._num_running,
            running_bytes=round(self._running_bytes),
            link=self._sending.snapshot(self._sending.link.num_transfers),
            main_running=run.main.engine.num_jobs,
            main_capacity=run.main.spec.max_rows,
            begun=run.transfer is not None,
        )
        if choose_completion(snapshot, self._spec.policy.background).complete:
            begin(self._complete(run))
        else:
            self._sending.stop(run)
            self._leave_main(run)

    def _complete(self, run: Running) -> Steps:
        self._num_running += 1
        self._running_bytes += run.kv_bytes
        self._sending.put_off(run)
        yield either(self._env, run.arrival, self._env.timeout(self._spec.policy.background.deadline_s))
        self._num_running -= 1
        self._running_bytes -= run.kv_bytes
        if run.arrival.processed:
            run.main.cache.put(run.request.prompt.chain)
        else:
            self._sending.stop(run)
        self._leave_main(run)
