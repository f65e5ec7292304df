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


def least_loaded(
    workers: Sequence[WorkerLoad], role: Role, excluded: frozenset[str] = frozenset(), preferred: str | None = None
) -> WorkerLoad | None:
    """The ready worker of ``role`` with the smallest share of its rows in use, by name on ties; None when there is none. ``preferred``,
    which has what the request needs, before them while it has a row free.
    """
    candidates = [w for w in workers if w.role == role and w.ready and w.name not in excluded]
    for worker in candidates:
        if worker.name == preferred and worker.num_held < worker.max_rows:
            return worker
    return min(candidates, key=lambda w: (w.num_held / w.max_rows, w.name), default=None)
