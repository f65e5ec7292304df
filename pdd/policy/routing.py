"""Which worker of a role takes a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdd.roles import Role


@dataclass(frozen=True)
class WorkerLoad:
    """``num_held``: requests that hold something on the worker now."""

    name: str
    role: Role
    ready: bool
    num_held: int
    max_rows: int


def least_loaded(workers: Sequence[WorkerLoad], role: Role, excluded: frozenset[str] = frozenset()) -> WorkerLoad | None:
    """The ready worker of ``role`` with the smallest share of its rows in use, by name on ties; None when there is none."""
    candidates = [w for w in workers if w.role == role and w.ready and w.name not in excluded]
    return min(candidates, key=lambda w: (w.num_held / w.max_rows, w.name), default=None)
