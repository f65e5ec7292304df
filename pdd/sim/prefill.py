"""A prefill engine under the virtual clock, step by step: which prompt gets how much of a step is the live worker's own scheduler."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from pdd.sim.server import SharedServer
from pdd.sim.spec import Jitter, RoleSpec
from pdd.worker.scheduler import RowDemand, StepBudget, plan_step


@dataclass(eq=False, slots=True)
class PrefillJob:
    """``left``: tokens to compute · ``behind``: that are in KV before them · ``computed``: is told of each step's new tokens, ``done``
    after the last.
    """

    number: int
    left: int
    behind: int
    computed: Callable[[int], None]
    done: Callable[[], None]
    more_s: float = 0.0
    last_step: int = 0
    demand: RowDemand | None = None  # as it is; None: has changed

    def ask(self) -> RowDemand:
        if self.demand is None:
            self.demand = RowDemand(str(self.number), self.number, self.left, samples=False, last_step=self.last_step)
        return self.demand


class PrefillEngine:
    """``server`` keeps the pace: a step is a job of as many seconds as it takes alone."""

    def __init__(self, spec: RoleSpec, server: SharedServer, jitter: Jitter) -> None:
        self._cost = spec.cost
        self._budget = StepBudget(spec.step_tokens, spec.max_rows)
        self._server = server
        self._jobs: dict[int, PrefillJob] = {}  # in order of arrival
        self._number = 0
        self._num_steps = 0
        self._stepping = False
        self._sigma = jitter.sigma
        self._random = random.Random(jitter.seed)

    def add(
        self, miss_tokens: int, hit_tokens: int, computed: Callable[[int], None], done: Callable[[], None], more_s: float = 0.0
    ) -> PrefillJob:
        """It has its first row when the step that runs has ended. ``more_s``: that its first step takes longer."""
        job = PrefillJob(self._number, miss_tokens, hit_tokens, computed, done, more_s)
        self._number += 1
        if miss_tokens == 0:
            done()
            return job
        self._jobs[job.number] = job
        if not self._stepping:
            self._step()
        return job

    def cancel(self, job: PrefillJob) -> bool:
        """Nobody wants it: it has no row after the step that runs. False: it was done."""
        if self._jobs.pop(job.number, None) is None:
            return False
        job.computed, job.done = _known, _ended
        return True

    def _step(self) -> None:
        rows = self._rows()
        self._stepping = bool(rows)
        if not rows:
            return
        self._num_steps += 1
        work_s, new_tokens = 0.0, 0
        for job, tokens in rows:
            new_tokens += tokens
            work_s += self._cost.attention(tokens, job.behind) + (0.0 if job.last_step else job.more_s)
        work_s += self._cost.prefill_step(new_tokens)
        if self._sigma:
            work_s *= math.exp(self._random.gauss(0.0, self._sigma))
        self._server.run(work_s, lambda: self._stepped(rows))

    def _rows(self) -> list[tuple[PrefillJob, int]]:
        if len(self._jobs) < 2:
            return [(job, min(job.left, self._budget.max_step_tokens)) for job in self._jobs.values()]
        demands = [job.ask() for job in self._jobs.values()]
        return [(self._jobs[int(row.request_id)], row.num_tokens) for row in plan_step(demands, self._budget).rows]

    def _stepped(self, rows: list[tuple[PrefillJob, int]]) -> None:
        for job, tokens in rows:
            job.left -= tokens
            job.behind += tokens
            job.last_step = self._num_steps
            job.demand = None
            if job.left == 0:
                self._jobs.pop(job.number, None)  # unless it was cancelled
            job.computed(tokens)
            if job.left == 0:
                done = job.done
                job.computed, job.done = _known, _ended  # who asked holds the job: nothing is to go round in circles
                done()
        self._step()


def _known(_: int) -> None:
    """Of a job that is done."""


def _ended() -> None:
    """Likewise."""
