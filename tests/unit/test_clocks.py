"""Deadlines, leases and back-offs are monotonic: nothing that decides may look at the wall clock, which jumps."""

from __future__ import annotations

import ast
from pathlib import Path

import pdd
import pddbridge

ROOTS = tuple(Path(module.__file__).parent for module in (pdd, pddbridge) if module.__file__)
_WALL = {("time", "time"), ("time", "time_ns"), ("time", "localtime"), ("time", "gmtime"), ("datetime", "now"), ("datetime", "utcnow")}
# Told to clients or written into certificates and prompts as dates, and decided on by nobody here.
ALLOWED = {"serving/openai/params.py", "serving/openai/app.py", "serving/text/template.py", "certs.py", "bench", "chaos", "conform"}


def wall_clock_uses(source: str) -> list[int]:
    """Lines that read the wall clock."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in _WALL
    ]


def test_no_decision_reads_the_wall_clock() -> None:
    found = {}
    for root in ROOTS:
        for file in sorted(root.rglob("*.py")):
            name = str(file.relative_to(root))
            if name in ALLOWED or name.split("/")[0] in ALLOWED or "/gen/" in f"/{name}":
                continue
            if lines := wall_clock_uses(file.read_text(encoding="utf-8")):
                found[name] = lines
    assert found == {}


def test_the_check_sees_what_it_looks_for() -> None:
    assert wall_clock_uses("import time\nx = time.time() + 3\n") == [2]
    assert wall_clock_uses("from datetime import datetime\nnow = datetime.now\n") == [2]
    assert wall_clock_uses("import time\ntime.monotonic()\n") == []
