"""Native kernels are built once, kept whole, and missed by name where they cannot be built."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from pddbridge import native_build
from pddkernels.native import build
from pddkernels.native.build import NO_COMPILER, NOT_COMPILED, NativeUnavailableError

load = build.load.__wrapped__  # each call anew


def test_a_library_is_built_once_per_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "not" / "there yet"
    first = load(str(cache))
    (library,) = cache.iterdir()
    built = library.stat().st_mtime_ns
    monkeypatch.setattr(native_build, "_build", lambda *arguments: pytest.fail("built again"))
    assert load(str(cache)).pdd_span() == first.pdd_span()
    assert library.stat().st_mtime_ns == built


def test_who_starts_together_builds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def slowly(compiler: str, flags: tuple[str, ...], sources: Path, headers: Path, library: Path) -> Path:
        built.append(library)
        Event().wait(0.2)
        library.write_bytes(b"")
        return library

    monkeypatch.setattr(native_build, "_build", slowly)
    library = tmp_path / "cache" / "some.so"
    with ThreadPoolExecutor(3) as workers:
        for _ in range(3):
            workers.submit(native_build._build_once, "g++", (), tmp_path, tmp_path, library)
    assert built == [library]
    assert list(library.parent.iterdir()) == [library]


def test_who_waits_for_a_builder_that_is_killed_builds(tmp_path: Path) -> None:
    library = tmp_path / "cache" / "some.so"
    code = (
        "import sys, threading; from pathlib import Path; from pddbridge import native_build\n"
        "def build(*arguments): print('building', flush=True); threading.Event().wait()\n"
        "native_build._build = build; native_build._build_once('g++', (), Path(), Path(), Path(sys.argv[1]))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(library)], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "building\n"
            (tmp_path / "one.cpp").write_text('extern "C" int one() { return 1; }')
            with ThreadPoolExecutor(1) as workers:
                second = workers.submit(native_build._build_once, "g++", native_build._FLAGS, tmp_path, tmp_path, library)
                with pytest.raises(TimeoutError):
                    second.result(0.5)
                first.kill()
                second.result(60)
        finally:
            first.kill()
    assert native_build._load(library).one() == 1


def test_a_compiler_has_processor_time_whatever_time_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a build of seconds takes minutes; one that computes without an end is a failure with a name."""
    monkeypatch.setattr(native_build, "_PROCESSOR_LIMIT_S", 1)
    assert native_build._run(["sh", "-c", "sleep 1.5; echo done"]).stdout == "done\n"
    with pytest.raises(NativeUnavailableError) as caught:
        native_build._run([sys.executable, "-c", "while True: pass"])
    assert caught.value.reason == NOT_COMPILED


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_a_compiler_and_its_children_end_with_who_started_it(tmp_path: Path, signal_number: signal.Signals) -> None:
    slow = tmp_path / "slow-compiler"
    slow.write_text("#!/bin/sh\nsleep 60 & echo $$ $! > pids.part && mv pids.part pids; wait\n")
    slow.chmod(0o755)
    code = f"from pddbridge import native_build; native_build._run([{str(slow)!r}])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as worker:
        try:
            until((tmp_path / "pids").exists)
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            assert all(map(runs, pids))
            worker.send_signal(signal_number)
            worker.wait(30)
            until(lambda: not any(map(runs, pids)))
        finally:
            worker.kill()


def runs(pid: int) -> bool:
    """Not so one that has ended and that nobody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        Event().wait(0.02)


def test_other_sources_headers_or_flags_are_another_library(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or ""
    sources, headers = tmp_path / "sources", tmp_path / "headers"
    sources.mkdir()
    headers.mkdir()

    def key(*flags: str) -> str:
        return native_build._key(compiler, (*native_build._FLAGS, *flags), sources, headers)

    keys = [key(), key("-DOTHER")]
    (sources / "one.cpp").write_text("")
    keys.append(key())
    (headers / "all.h").write_text("")  # all sources may include it
    keys.append(key())
    assert len(set(keys)) == 4


def test_no_compiler_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NativeUnavailableError, match="no C\\+\\+ compiler") as caught:
        load(None)
    assert caught.value.reason == NO_COMPILER


def test_a_failing_compiler_has_a_name_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++")
    monkeypatch.setattr(build, "_HERE", tmp_path)
    with pytest.raises(NativeUnavailableError, match=r"broken\.cpp") as caught:
        load(str(tmp_path / "cache"))
    assert caught.value.reason == NOT_COMPILED
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_no_library_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_key", lambda *arguments: "key")
    (tmp_path / "native-key.so").write_bytes(b"")
    with pytest.raises(NativeUnavailableError) as caught:
        load(str(tmp_path))
    assert caught.value.reason == NOT_COMPILED


def test_the_library_shares_the_frameworks_threads(tmp_path: Path) -> None:
    """Two copies of the OpenMP runtime would be two pools of threads on the same cores."""
    code = (
        "import sys, torch; from pddkernels.native.build import load; load(sys.argv[1]);"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1
