"""What is measured and how a measuring child is asked: one JSON line per question, one per answer. Both sides of the pipe import this."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

Phase = Literal["prefill", "decode"]


class ChildError(Exception):
    """A measuring child ended or failed; the message holds its last words."""


@dataclass(frozen=True)
class Case:
    """``prefill``: one prompt of ``context`` tokens. ``decode``: ``steps`` steps of ``streams`` rows that have ``context`` tokens each."""

    phase: Phase
    streams: int
    context: int
    steps: int

    @property
    def num_tokens(self) -> int:
        """What the measured seconds produced."""
        return self.context if self.phase == "prefill" else self.streams * self.steps


@dataclass(frozen=True)
class Limits:
    """Measured on this machine with the same number of threads: bytes read per second, floating-point operations per second by dtype."""

    read_bytes_s: float
    flops_s: Mapping[str, float]


class Subject(Protocol):
    """Something that prefills and decodes. Both return seconds, and raise ValueError for a case beyond their sizes."""

    def prefill(self, num_tokens: int) -> float: ...
    def decode(self, streams: int, context: int, steps: int) -> float: ...


class Child:
    """One measuring process: loads its subject once, then sleeps between questions. ``close`` ends it."""

    def __init__(self, name: str, arguments: list[str], module: str = "pdd.bench.engine_child") -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_ready(self) -> None:
        """Raises ChildError when it cannot start; the reason is on its stderr."""
        self._answer()

    def seconds(self, case: Case) -> float:
        """Raises ChildError."""
        answer = self.ask(asdict(case))["seconds"]
        assert isinstance(answer, float)
        return answer

    def limits(self) -> Limits:
        """Raises ChildError."""
        answer = self.ask({"phase": "limits"})
        read, flops = answer["read_bytes_s"], answer["flops_s"]
        assert isinstance(read, float)
        assert isinstance(flops, dict)
        return Limits(read, flops)

    def close(self) -> None:
        """Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, question: Mapping[str, object]) -> dict[str, object]:
        """The answer to ``question``. Raises ChildError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildError(f"{self.name}: ended, status {self._process.wait()}") from error
        return self._answer()

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(f"{self.name}: ended, status {self._process.wait()}")
        answer: dict[str, object] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer
