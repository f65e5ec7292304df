"""Modelled workers: rows, a prefix cache, an engine whose pace follows its cost."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from pdd.policy.estimates import Ratio
from pdd.policy.routing import RoutingLimits, WorkerLoad, choose_worker
from pdd.roles import Role
from pdd.sim.cache import PrefixCache, Prompt
from pdd.sim.prefill import PrefillEngine
from pdd.sim.server import Host, Job, Places, SharedServer
from pdd.sim.spec import Jitter, RoleSpec

# After so many more tokens what was learned of prefill's pace has lost half its weight, as in the live coordinator.
_HALF_LIFE_TOKENS = 20_000


class Worker:
    """``held``: requests that have a row or wait for one, as a coordinator counts them · ``prefill``: what steps through prompts, where it
    is that role's · ``pace``: seconds per prompt token that requests saw, waiting included.
    """

    def __init__(self, env: simpy.Environment, name: str, role: Role, spec: RoleSpec, host: Host | None, jitter: Jitter) -> None:
        self.name = name
        self.role = role
        self.spec = spec
        self.held = 0
        self.cache = PrefixCache(spec.cache_tokens)
        self.rows = Places(env, spec.max_rows)
        self.pace = Ratio(_HALF_LIFE_TOKENS)
        self._host = host
        self._load = WorkerLoad(name, role, True, 0, spec.max_rows)
        self.engine = SharedServer(env, self._prefill_pace if role == "prefill" else self._decode_pace)
        self.prefill = PrefillEngine(spec, self.engine, jitter)
        if host is not None:
            host.add(role, self.engine)

    def load(self, prompt: Prompt) -> WorkerLoad:
        """For the routing, which is asked for every request, while most workers are as they were."""
        known = self.cache.peek_tokens(prompt.chain)
        if (self._load.num_held, self._load.prefix_tokens) != (self.held, known):
            self._load = WorkerLoad(self.name, self.role, True, self.held, self.spec.max_rows, known)
        return self._load

    @property
    def _speed(self) -> float:
        return 1.0 if self._host is None else self._host.speed(self.role)

    def _prefill_pace(self, num_jobs: int, _: float) -> float:
        return self._speed  # one step at a time, work in seconds

    def _decode_pace(self, num_jobs: int, context_tokens: float) -> float:
        return self._speed / self.spec.cost.step(num_jobs, context_tokens)  # tokens per second of each row

    def decode(self, tokens: int, context_tokens: float, arrive_steps: float = 1.0) -> tuple[Job, float]:
        """A row, its first token after ``arrive_steps`` where others decode, else after one: its job, and the seconds to that token."""
        job = self.engine.add(tokens, context_tokens, lead=arrive_steps - 1.0 if self.engine.num_jobs else 0.0)
        return job, self.engine.until(job, 1)

    def busy_s(self, num_steps: float) -> float:
        """What so many steps take of those that run now; nothing where none do."""
        return num_steps * self.spec.cost.step(self.engine.num_jobs, self.engine.weight) / self._speed if self.engine.num_jobs else 0.0

    def step_s(self, more_context: float) -> float:
        """Of a decode step with one more row."""
        return self.spec.cost.step(self.engine.num_jobs + 1, self.engine.weight + more_context) / self._speed


class Fleet:
    """The workers of one role, chosen from by the live system's routing."""

    def __init__(self, env: simpy.Environment, role: Role, spec: RoleSpec, host: Host | None, jitter: Jitter) -> None:
        self.role = role
        self.workers = [Worker(env, f"{role}-{index}", role, spec, host, jitter) for index in range(spec.count)]
        self._by_name = {worker.name: worker for worker in self.workers}
        self._limits = RoutingLimits()

    def route(self, prompt: Prompt) -> Worker:
        """Prefix affinity that yields to load. What a worker holds stands for what it was sent, which is what a coordinator remembers."""
        if len(self.workers) == 1:
            return self.workers[0]
        chosen = choose_worker([worker.load(prompt) for worker in self.workers], self.role, limits=self._limits)
        assert chosen is not None
        return self._by_name[chosen.name]


def num_running(workers: Sequence[Worker]) -> int:
    return sum(worker.engine.num_jobs for worker in workers)
