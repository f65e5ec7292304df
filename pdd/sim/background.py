"""Transfers to main whose request has ended on the relay: under the virtual clock, by the live system's decision."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from pdd.policy.alignment import HitWindow
from pdd.policy.completion import POLL_S, CompletionSnapshot, choose_completion, pressing
from pdd.policy.link_schedule import Priority
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
        self._rules = spec.policy.background
        self._kv_bytes_per_token = spec.kv_bytes_per_token
        self._sending = sending
        self._hits = hits
        self._leave_main = leave_main
        self._num_running = 0
        self._running_bytes = 0.0

    def ended(self, run: Running) -> None:
        """``run`` has, and main's KV has yet to come: it goes on for its prefix alone, or is stopped."""
        if choose_completion(self._snapshot(run), self._rules).complete:
            begin(self._complete(run))
        else:
            self._sending.stop(run)
            self._leave_main(run)

    def _complete(self, run: Running) -> Steps:
        """Until it is, or something comes up that speaks against it, or its time is over."""
        self._sending.set_priority(run, Priority.BACKGROUND)
        ends_s = self._env.now + self._rules.deadline_s
        pressed = False
        while not (pressed or run.arrival.processed or self._env.now >= ends_s):
            self._count(run, 1)
            yield either(self._env, run.arrival, self._env.timeout(min(POLL_S, ends_s - self._env.now)))
            self._count(run, -1)
            pressed = pressing(self._snapshot(run), self._rules) is not None
        if run.arrival.processed:
            run.main.cache.put(run.request.prompt.chain)
        else:
            self._sending.stop(run)
        self._leave_main(run)

    def _count(self, run: Running, num: int) -> None:
        self._num_running += num
        self._running_bytes += num * run.kv_bytes

    def _snapshot(self, run: Running) -> CompletionSnapshot:
        """Of what runs, ``run`` itself not counted."""
        num_bytes = round(run.main_miss * self._kv_bytes_per_token)
        return CompletionSnapshot(
            miss_tokens=run.main_miss,
            num_bytes=num_bytes,
            gap=self._hits.rates(self._env.now).gap,
            num_running=self._num_running,
            running_bytes=round(self._running_bytes),
            link=self._sending.beside(run, self._running_bytes + num_bytes),
            main_running=run.main.held - run.at_main,
            main_capacity=run.main.spec.max_rows,
            begun=run.transfer is not None,
        )
