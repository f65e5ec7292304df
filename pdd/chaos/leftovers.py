"""What dead processes may leave in the machine: processes, files in /dev/shm, socket files, memory that only one side still maps.

Looks only at processes of this deployment, known by the mark that they inherit, so nothing that others do is counted.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

MARK = "PDD_CHAOS"
_SHM = "/dev/shm/"
_ARENA = "/memfd:pdd-kv"


class Leftovers:
    """``mark``: the value of the environment variable MARK that the deployment's processes were started with."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._seen_files: set[str] = set()

    def note(self) -> None:
        """Remember the named files that our processes have open or mapped now. To be called before any of them dies."""
        for process in self._ours():
            try:
                self._seen_files |= {line.split(maxsplit=5)[5] for line in _maps(process.pid) if f" {_SHM}" in line}
                self._seen_files |= {file.path for file in process.open_files() if file.path.startswith(_SHM)}
                names = [str(connection.laddr) for connection in process.net_connections("unix")]
                self._seen_files |= {name for name in names if name.startswith("/")}
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
                continue

    def orphans(self, expected_pids: set[int]) -> list[str]:
        """Processes of ours that are not ``expected_pids`` or below them, noted files that no living one of ours uses, and shared memory
        that only one process maps. True at rest; while transfers begin or end, memory may be mapped once for a moment.
        """
        found: list[str] = []
        arenas: dict[str, list[str]] = {}
        used: set[str] = set()
        for process in self._ours():
            try:
                family = {process.pid, *(parent.pid for parent in process.parents())}
                mapped = {(line.split()[4], line.split(maxsplit=5)[5]) for line in _maps(process.pid) if len(line.split()) > 5}
                used |= {file.path for file in process.open_files()} | {path.strip() for _, path in mapped}
                used |= {str(connection.laddr) for connection in process.net_connections("unix")}
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
                continue
            for inode in {inode for inode, path in mapped if path.startswith(_ARENA)}:
                arenas.setdefault(inode, []).append(_name(process))
            if not family & expected_pids:
                found.append(f"process {process.pid} {process.name()}")
        found += [f"file {path}" for path in sorted(self._seen_files - used) if os.path.exists(path)]
        return found + [f"shared memory {inode} mapped by {names[0]} alone" for inode, names in arenas.items() if len(names) == 1]

    def _ours(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(MARK) == self._mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


def _name(process: psutil.Process) -> str:
    """As the launcher calls it, where it is a worker."""
    argv = process.cmdline()
    return argv[argv.index("--name") + 1] if "--name" in argv[:-1] else f"{process.name()} {process.pid}"


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
