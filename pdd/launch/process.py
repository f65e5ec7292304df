"""One child process of the launcher: started, watched through the JSON lines it prints, ended by closing its stdin."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ChildEvent:
    """A line a child reported, or ``event == "exited"`` with ``status`` in fields."""

    name: str
    event: str
    fields: dict[str, str | int | float]


class ChildProcess:
    """Puts every event into ``events``. The child is in a process group of its own: a Ctrl-C at the terminal reaches the launcher alone.
    Not in a session of its own: Linux shares cores out by session first, and only within one does a thread that gives way
    (:mod:`pddbridge.give_way`) do so for all processes of a deployment.
    """

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log: Path, events: queue.Queue[ChildEvent]) -> None:
        self.name = name
        self.log = log
        self._events = events
        self._answered = threading.Condition()
        self._answers: list[ChildEvent] = []  # to orders, until they are looked at
        self._ready = threading.Event()
        self.heard_s: float | None = None  # monotonic: when it last said that it is alive; None before it did
        with log.open("ab") as stderr:
            self._popen = subprocess.Popen(
                argv, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, process_group=0
            )
        self._reader = threading.Thread(target=self._read, name=f"{name}-events", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def running(self) -> bool:
        return self._popen.poll() is None

    def last_words(self, lines: int = 3) -> str:
        """The end of the child's stderr: for one clear line where it failed to start."""
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        return "\n".join(text.splitlines()[-lines:])

    def ask_to_stop(self) -> None:
        """Close its stdin and send SIGTERM; returns at once."""
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            self._popen.stdin.close()
        if self.running():
            self._popen.send_signal(signal.SIGTERM)

    def tell(self, line: str) -> None:
        """Write one line to its stdin. Raises OSError when it has ended."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(line.encode() + b"\n")
        self._popen.stdin.flush()

    def order(self, line: str, timeout_s: float) -> ChildEvent:
        """Tell it and wait for its answer to just that. Raises TimeoutError, OSError when it has ended, ValueError when it refuses."""
        deadline_s = time.monotonic() + timeout_s
        with self._answered:
            self._answers = [answer for answer in self._answers if answer.fields["order"] != line]
        self.tell(line)
        with self._answered:
            while (answer := next((a for a in self._answers if a.fields["order"] == line), None)) is None:
                if not self._answered.wait(min(1.0, max(0.0, deadline_s - time.monotonic()))):
                    if not self.running():
                        raise OSError(f"{self.name} has ended: {self.last_words(1)}")
                    if time.monotonic() >= deadline_s:
                        raise TimeoutError(f"{self.name} has not answered {line!r} after {timeout_s:g} s")
            self._answers.remove(answer)
        if answer.event == "refused":
            raise ValueError(f"{self.name}: {answer.fields.get('why')}")
        return answer

    def wait_ready(self, timeout_s: float) -> None:
        """Until it has reported ready. Raises TimeoutError, OSError when it ends before."""
        deadline_s = time.monotonic() + timeout_s
        while not self._ready.wait(0.2):
            if not self.running():
                raise OSError(f"{self.name} has ended: {self.last_words(1)}")
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"{self.name} is not ready after {timeout_s:g} s")

    def kill(self) -> None:
        """SIGKILL, as a crash would look."""
        if self.running():
            self._popen.kill()
        self._popen.wait()

    def wait(self, deadline_s: float) -> bool:
        """Wait until ``deadline_s`` (monotonic); kill what is left. True when it ended by itself."""
        try:
            self._popen.wait(max(0.0, deadline_s - time.monotonic()))
            ended = True
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
            ended = False
        self._reader.join(timeout=5)
        return ended

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            try:
                fields = json.loads(line)
                event = fields.pop("event")
            except (ValueError, KeyError, AttributeError, TypeError):
                continue  # a library printed something of its own; only our JSON lines are events
            if event == "alive":
                self.heard_s = time.monotonic()
            elif "order" in fields:
                with self._answered:
                    self._answers.append(ChildEvent(self.name, event, fields))
                    self._answered.notify_all()
            else:
                if event == "ready":
                    self._ready.set()
                self._events.put(ChildEvent(self.name, event, fields))
        self._popen.stdout.close()
        self._events.put(ChildEvent(self.name, "exited", {"status": self._popen.wait()}))
