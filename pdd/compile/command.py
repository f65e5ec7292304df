"""The command ``pdd compile``: which children run, what is shown, what is written, the exit status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pdd.compile.children import TARGETS, Row, Runner, children
from pdd.compile.table import progress, show


def compile_status(
    targets: Sequence[str], small: bool, jobs: int, json_file: Path | None, console: Console, steps: str | None = None
) -> int:
    """0 if everything compiled and fits its chip, else 1. Raises ValueError as :func:`pdd.compile.children.children` does."""
    every = TARGETS if steps is None else tuple(name for name in TARGETS if name.startswith("tpu-"))
    chosen = every if "all" in targets else tuple(dict.fromkeys(targets))
    work = children(chosen, small, steps)

    def tell(row: Row) -> None:
        console.print(progress(row), style=None if row["ok"] else "red", markup=False, soft_wrap=True)

    rows = Runner(tell).run_all(work, jobs)
    show(rows, console)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if rows and all(row["ok"] for row in rows) else 1
