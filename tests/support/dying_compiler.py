"""Run as a child of ``pdd compile``: a compiler that takes its process down while it compiles the second of three things."""

from __future__ import annotations

import argparse
import os
import sys

from pddkernels.targets.hardware import target
from pddkernels.targets.report import Case, Compiled, compile_all
from pddkernels.targets.work import Work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target")
    parser.add_argument("--first", type=int)
    arguments = parser.parse_args()

    def succeed() -> Compiled:
        return Compiled(Work(1e9, 1e9))

    def die() -> Compiled:
        print("Check failed: registers.size() > 0", file=sys.stderr, flush=True)
        os.abort()

    compile_all(
        target(arguments.target), [Case("kernel", "a", succeed), Case("step", "b", die, 8), Case("kernel", "c", succeed)], arguments.first
    )


if __name__ == "__main__":
    main()
