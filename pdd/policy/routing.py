"""Which worker of a role takes a request: the least loaded, or one that knows the prompt's beginning while its load allows it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdd.roles import Role

# named: the caller knows that it has what the request needs · prefix: it was sent the same beginning before · prefix_yields: another was,
# but is too loaded · least_loaded: nobody was sent this beginning · only: there is no choice
RouteReason = Literal["named", "prefix", "prefix_yields", "least_loaded", "only"]


@dataclass(frozen=True)
class WorkerLoad:
    """``num_held``: requests that hold something on the worker now · ``prefix_tokens``: of this prompt that it was sent before."""

    name: str
    role: Role
    ready: bool
    num_held: int
    max_rows: int
    prefix_tokens: int = 0

    @property
    def load(self) -> float:
        """Share of its rows in use; above 1 where requests wait."""
        return self.num_held / self.max_rows


@dataclass(frozen=True)
class RoutingLimits:
    """``affinity_slack``: by how much the load of a worker that knows the prompt may be above the smallest · ``min_prefix_tokens``: that
    make it worth it.
    """

    affinity_slack: float = 0.25
    min_prefix_tokens: int = 64


@dataclass(frozen=True)
class Route:
    """``prefix_tokens`` and ``load``: of the chosen worker, what is predicted to be found there and how full it was."""

    name: str
    reason: RouteReason
    prefix_tokens: int
    load: float
    text: str


def choose_worker(
    workers: Sequence[WorkerLoad],
    role: Role,
    excluded: frozenset[str] = frozenset(),
    preferred: str | None = None,
    limits: RoutingLimits = RoutingLimits(),
) -> Route | None:
    """A ready worker of ``role``, None when there is none. ``preferred`` before all others while it has a row free; then the worker with
    the longest known prefix, unless it has no row free or its load is more than ``affinity_slack`` above the smallest; then the smallest
    share of rows in use, by name on ties.
    """
    able = [w for w in workers if w.role == role and w.ready and w.name not in excluded]
    if not able:
        return None
    emptiest = min(able, key=lambda w: (w.load, w.name))
    named = next((w for w in able if w.name == preferred and w.num_held < w.max_rows), None)
    if named is not None:
        return _route(named, "named", "it has what the request needs")
    if len(able) == 1:
        return _route(emptiest, "only", "no other worker of this role is ready")
    known = max(able, key=lambda w: (w.prefix_tokens, -w.load, w.name))
    if known.prefix_tokens < max(1, limits.min_prefix_tokens):
        return _route(emptiest, "least_loaded", f"{known.prefix_tokens} tokens of the prompt are known anywhere")
    if known.num_held < known.max_rows and known.load <= emptiest.load + limits.affinity_slack:
        return _route(known, "prefix", f"{known.prefix_tokens} tokens of the prompt are there")
    if known.load == emptiest.load:  # all are full: then it may as well wait where its prefix is
        return _route(known, "prefix", f"{known.prefix_tokens} tokens of the prompt are there, all are as full")
    text = f"{known.name} knows {known.prefix_tokens} tokens and is {known.load:.2f} full, this one {emptiest.load:.2f}"
    return _route(emptiest, "prefix_yields", text)


def _route(worker: WorkerLoad, reason: RouteReason, text: str) -> Route:
    return Route(worker.name, reason, worker.prefix_tokens, worker.load, text)
