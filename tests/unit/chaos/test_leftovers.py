"""What is left in the machine is found, and what belongs to somebody, or to others, is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from pdd.chaos.leftovers import MARK, Leftovers

SHM = Path("/dev/shm")
# Holds a file in /dev/shm and shared memory that nobody else maps, until its stdin ends.
HOLDER = """
import mmap, os, sys
kept = open(sys.argv[1], "wb+")
arena = os.memfd_create("pdd-kv"); os.ftruncate(arena, 4096); mapped = mmap.mmap(arena, 4096)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(mark: str, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(argv, env={**os.environ, MARK: mark}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        try:
            yield child
        finally:
            child.kill()


def test_processes_files_and_memory() -> None:
    mark, file = uuid4().hex, SHM / f"chaos-test-{uuid4().hex}"
    leftovers = Leftovers(mark)
    try:
        with holder(mark, file) as child:
            leftovers.note()
            found = leftovers.orphans(set())
            assert any(what.startswith(f"process {child.pid} ") for what in found)
            assert any("shared memory" in what for what in found)
            assert not any(str(file) in what for what in found), "its owner lives"
            assert all("process" not in what.split()[0] for what in leftovers.orphans({child.pid}))
            assert Leftovers(uuid4().hex).orphans(set()) == [], "that of others is not looked at"
        assert leftovers.orphans(set()) == [f"file {file}"]
    finally:
        file.unlink(missing_ok=True)
    assert leftovers.orphans(set()) == []
