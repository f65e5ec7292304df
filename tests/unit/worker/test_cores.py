"""Cores of a worker's own: the thread that asks is bound, and those that it starts, and no other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from pdd.worker.cores import compute_on


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_and_what_it_starts_are_bound_and_no_other() -> None:
    before, found = os.sched_getaffinity(0), {}
    one = max(before)

    def compute() -> None:
        compute_on([one])
        found["own"] = os.sched_getaffinity(0)
        in_thread(lambda: found.update(started=os.sched_getaffinity(0)))

    in_thread(compute)
    assert found == {"own": {one}, "started": {one}}
    assert os.sched_getaffinity(0) == before


def test_a_core_that_is_not_there_is_refused_by_name() -> None:
    allowed = os.sched_getaffinity(0)
    absent = max(allowed) + 1000
    with pytest.raises(ValueError, match=rf"cpus: given \[{min(allowed)}, {absent}\], allowed here \[{min(allowed)}"):
        compute_on([absent, min(allowed)])
    assert os.sched_getaffinity(0) == allowed
