"""`python -m benchmarks.gpu`: see the package."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.gpu import stand_ins
from benchmarks.gpu.children import Child, cores
from benchmarks.gpu.findings import Finding, PartResult, count, lines, save_part, save_report
from benchmarks.gpu.machine import describe
from benchmarks.gpu.parts import PARTS, Part, Setting
from benchmarks.gpu.sizes import SIZES

_MEASURED: Final = Path("docs/measurements/gpu.json")
# Where there is nothing to measure, what was measured elsewhere stays.
_NOT_MEASURED: Final = Path("build/gpu.json")
_AT_ONCE: Final = 6
_RUN_S: Final = 520.0  # under 9 minutes, whatever hangs


def main(arguments: list[str]) -> int:
    """0, 1 when a check failed, 2 for a mistake in the options."""
    options = _parser().parse_args(arguments)
    if options.machine:
        print(json.dumps(describe()))
        return 0
    if options.part:
        _run_part(PARTS[options.part], options)
        return 0
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        print(f"--parts: given {unknown}, allowed {list(PARTS)}", file=sys.stderr)
        return 2
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the same code where there is no GPU")
    parser.add_argument("--sizes", choices=tuple(SIZES), default="full")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="names, by default all")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn; by default another one each time")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=tuple(PARTS), default=None, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=max(1, cores() // 2), help="that an engine computes with on the host")
    return parser


def _run_part(part: Part, options: argparse.Namespace) -> None:
    """In this process; what it finds goes to ``--json``."""
    stand_ins.provide()
    began = time.monotonic()
    findings = part.run(Setting(options.device, SIZES[options.sizes], options.seed, options.threads))
    save_part(PartResult(part.name, time.monotonic() - began, tuple(findings)), options.json)


def _run(options: argparse.Namespace) -> int:
    began = time.monotonic()
    seed = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
    parts = [PARTS[name] for name in options.parts]
    with tempfile.TemporaryDirectory() as scratch:
        shared = ("--device", options.device, "--sizes", options.sizes, "--seed", str(seed), "--threads", str(options.threads))
        child = Child(shared, Path(scratch), began + _RUN_S)
        machine = child.ask_machine()
        print("make gpu: " + ", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
        path = options.json or _default_path("gpu" in machine and options.device == "cuda")
        try:
            _try_to_write(path)
        except OSError as error:
            print(f"make gpu: cannot write {str(path)!r}: {error.strerror}", file=sys.stderr)
            return 2
        results: list[PartResult] = []

        def done(result: PartResult) -> None:
            """Saved each time, so that a run that is cut off leaves what it found."""
            results.append(result)
            print("\n".join(lines(result)), flush=True)
            save_report(machine, {"device": options.device, "sizes": options.sizes, "seed": seed}, results, path)

        notes = stand_ins.provide()
        if notes:
            done(PartResult("packages", 0.0, tuple(Finding("stand-in", "measured", note) for note in notes)))
        skipped, runnable = _divide(parts, None if options.device == "cpu" else machine.get("no_gpu"))
        for result in skipped:
            done(result)
        child.run_all(runnable, min(_AT_ONCE, cores()), done)
    counts = count(results)
    told = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "measured", "skipped"))
    print(f"{told}; seed {seed}, {time.monotonic() - began:.0f} s, {path}")
    return 1 if counts["failed"] else 0


def _try_to_write(path: Path) -> None:
    """Raises OSError now, not when the first part has run. What is in the file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    was_there = path.exists()
    path.open("a").close()
    if not was_there:
        path.unlink()


def _divide(parts: list[Part], no_gpu: str | None) -> tuple[list[PartResult], list[Part]]:
    """Parts that cannot run here, each with the reason as its result, and those that can."""
    skipped, runnable = [], []
    for part in parts:
        absent = stand_ins.missing(part.needs)
        why = f"not importable: {', '.join(absent)}" if absent else no_gpu
        if why is None:
            runnable.append(part)
        else:
            skipped.append(PartResult(part.name, 0.0, (Finding("whole part", "skipped", why),)))
    return skipped, runnable


def _default_path(on_gpu: bool) -> Path:
    out = os.environ.get("OUT")
    if out:
        return Path(out) / "gpu.json"
    return _MEASURED if on_gpu else _NOT_MEASURED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
