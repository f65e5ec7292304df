"""``python -m pddkernels.targets --target T``: compile every kernel for one target, telling it as :mod:`pddkernels.targets.report` says."""

from __future__ import annotations

import argparse
import importlib

from pddkernels.targets.hardware import TARGETS, target
from pddkernels.targets.report import compile_all


def main() -> None:
    parser = argparse.ArgumentParser(description="compile every kernel for one target")
    parser.add_argument("--target", required=True, choices=sorted(TARGETS))
    parser.add_argument("--small", action="store_true", help="each kernel at one shape")
    parser.add_argument("--first", type=int, default=0, help="leave out the cases before this one")
    arguments = parser.parse_args()
    chosen = target(arguments.target)
    # Each of the two imports one framework; which is here is not for the other to know.
    module = importlib.import_module(f"pddkernels.targets.{'tpu' if chosen.topology else 'gpu'}")
    compile_all(chosen, module.cases(chosen, arguments.small), arguments.first)


if __name__ == "__main__":
    main()
