"""The child processes that compile, one framework each, and the rows they report. Owns how a dying compiler becomes a failed row.

A child prints JSON lines: ``{"start": index, "what", "kind", "num_devices", "total"}`` before each thing it compiles and its row after.
Some faults make a compiler end the process it runs in; then the thing it had started has failed, and another child goes on behind it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TextIO

TARGETS: Final = ("tpu-v5e", "tpu-v6e", "tpu-v5p", "cuda-sm80", "cuda-sm90", "hip-gfx942")
STEP_DTYPES: Final = ("bfloat16", "int8")
Row = dict[str, object]

_KERNELS: Final = "pddkernels.targets"
_STEPS: Final = "pddjax.aot"
_MESSAGE_LINES: Final = 12

_ENVIRONMENT: Final = {
    # libtpu compiles without a TPU; JAX itself must not look for one, nor libtpu ask the cloud what machine this is or hold a lock.
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # A kernel found in Triton's cache would take no time.
    "TRITON_ALWAYS_COMPILE": "1",
}


@dataclass(frozen=True)
class Child:
    """What one process compiles for one target: the ``module`` that does it, run with ``--target`` and ``options``."""

    target: str
    module: str
    options: tuple[str, ...] = ()


def children(targets: Iterable[str], small: bool, steps: str | None = None) -> list[Child]:
    """Kernels for every target, whole steps for TPUs. ``small``: each kernel at one shape and no step · ``steps``: steps in this compute
    dtype and no kernel.

    Raises ValueError for an unknown target or dtype, and where nothing is left.
    """
    if steps is not None and (small or steps not in STEP_DTYPES):
        raise ValueError(f"steps: given {steps!r}{' with small' if small else ''}, allowed {list(STEP_DTYPES)}, without small")
    found = []
    for target in targets:
        if target not in TARGETS:
            raise ValueError(f"target: given {target!r}, allowed {[*TARGETS, 'all']}")
        has_steps = target.startswith("tpu-") and not small
        if steps is not None and not has_steps:
            raise ValueError(f"steps: given {steps!r} for {target}, which has none, allowed TPUs")
        if steps is None:
            found.append(Child(target, _KERNELS, ("--small",) if small else ()))
        if has_steps:
            found.append(Child(target, _STEPS, () if steps is None else ("--compute-dtype", steps)))
    return found


class Runner:
    """Runs children and knows the processes that are alive, so that all of them end with the command."""

    def __init__(self, tell: Callable[[Row], None]) -> None:
        """``tell`` gets each row as it comes, from any thread."""
        self._tell = tell
        self._alive: set[subprocess.Popen[str]] = set()
        self._ended = False
        self._lock = threading.Lock()

    def run_all(self, work: Iterable[Child], jobs: int) -> list[Row]:
        """Rows of all children in the order given, up to ``jobs`` processes at once."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                return [row for rows in pool.map(self.run, work) for row in rows]
            except BaseException:
                self._end()
                raise

    def run(self, child: Child) -> list[Row]:
        """Rows of one child, restarted behind whatever it dies of."""
        rows: list[Row] = []
        first: int | None = 0
        while first is not None and not self._ended:
            first = self._run_from(first, child, rows)
        return rows

    def _run_from(self, first: int, child: Child, rows: list[Row]) -> int | None:
        """One process. Adds its rows; gives the index to go on at if it died at something before the last, else None."""
        command = [sys.executable, "-m", child.module, "--target", child.target, "--first", str(first), *child.options]
        started: dict[str, object] | None = None
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            with self._process(command, log) as process:
                assert process.stdout is not None
                began = time.perf_counter()
                for line in process.stdout:
                    message = json.loads(line)
                    if "start" in message:
                        started, began = message, time.perf_counter()
                    else:
                        started = None
                        rows.append(message)
                        self._tell(message)
            if self._ended or (process.returncode == 0 and started is None):
                return None
            log.seek(0)
            error = f"the compiler ended with status {process.returncode}: {_tail(log.read())}"
        rows.append(_failed(child, started, time.perf_counter() - began, error))
        self._tell(rows[-1])
        if started is None:
            return None
        index, total = started["start"], started["total"]
        assert isinstance(index, int)
        assert isinstance(total, int)
        return index + 1 if index + 1 < total else None

    @contextmanager
    def _process(self, command: list[str], log: TextIO) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **_ENVIRONMENT})
        with self._lock:
            self._alive.add(process)
            if self._ended:
                process.terminate()
        try:
            with process:
                yield process
        finally:
            with self._lock:
                self._alive.discard(process)

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._alive:
                process.terminate()


def _failed(child: Child, started: dict[str, object] | None, seconds: float, error: str) -> Row:
    told = started or {"what": f"start of {child.module}", "kind": "kernel", "num_devices": 1}
    return {
        "target": child.target,
        "kind": told["kind"],
        "what": told["what"],
        "num_devices": told["num_devices"],
        "ok": False,
        "error": error,
        "seconds": round(seconds, 2),
    }


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_MESSAGE_LINES:])
