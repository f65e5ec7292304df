"""Parts as processes: started, watched, ended in time; whatever becomes of one, there is a result that says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.findings import Finding, PartResult, load_part
from benchmarks.gpu.parts import Part

_LAST_LINES = 6
_ASK_S = 300.0


@dataclass(frozen=True)
class Child:
    """``arguments`` of ``python -m benchmarks.gpu`` that every part gets · ``scratch``: where results lie · ``deadline`` on
    ``time.monotonic``, when the whole run must be over.
    """

    arguments: tuple[str, ...]
    scratch: Path
    deadline: float

    def ask_machine(self) -> dict[str, str]:
        """Raises RuntimeError when the process that asks torch ends badly, TimeoutExpired when it does not end."""
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu", "--machine"], capture_output=True, text=True, check=False, timeout=_ASK_S
        )
        if done.returncode:
            raise RuntimeError(f"asking torch for devices ended with {done.returncode}: {_last_lines(done.stderr)}")
        facts: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return facts

    def run(self, part: Part) -> PartResult:
        left = self.deadline - time.monotonic()
        if left < 1:
            return _only(part, 0.0, Finding("whole part", "skipped", "no time is left"))
        out = self.scratch / f"{part.name.replace(' ', '-')}.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name, "--json", str(out), *self.arguments]
        began = time.monotonic()
        log = out.with_suffix(".log")
        with log.open("w") as stream:
            try:
                done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False, timeout=min(part.timeout_s, left))
            except subprocess.TimeoutExpired:
                why = f"not done in {min(part.timeout_s, left):.0f} s: {_last_lines(log.read_text())}"
                # A part that is cut off by the end of the run was not given its time: that is no failure.
                return _only(part, time.monotonic() - began, Finding("whole part", "failed" if part.timeout_s <= left else "skipped", why))
        if done.returncode == 0 and out.is_file():
            return load_part(out)
        why = f"its process ended with {done.returncode}: {_last_lines(log.read_text())}"
        return _only(part, time.monotonic() - began, Finding("whole part", "failed", why))

    def run_all(self, parts: Sequence[Part], at_once: int, done: Callable[[PartResult], None]) -> None:
        """Those that may share the device ``at_once``, then the others one by one; ``done`` gets each result, in this thread."""
        with ThreadPoolExecutor(at_once) as pool:
            for result in pool.map(self.run, (part for part in parts if not part.alone)):
                done(result)
        for part in parts:
            if part.alone:
                done(self.run(part))


def _only(part: Part, seconds: float, finding: Finding) -> PartResult:
    return PartResult(part.name, seconds, (finding,))


def _last_lines(text: str) -> str:
    return " | ".join(line.strip() for line in text.splitlines()[-_LAST_LINES:])


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
