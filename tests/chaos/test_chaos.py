"""`pdd chaos` on real processes: few seeds here, many by hand (see docs/measurements)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from pdd.chaos.command import Request, chaos_status

pytestmark = pytest.mark.system
COUNTS = ("lost", "duplicated", "wrong_tokens", "leaked_pages", "orphans", "unexplained_errors", "ended_twice", "not_idle", "died")


def run(tmp_path: Path, cache: Path, *, seeds: int, first_seed: int, shapes: str, engines: str = "torch,torch,torch") -> dict[str, object]:
    file = tmp_path / "chaos.json"
    request = Request(seeds, first_seed, None, 20, shapes, engines, file, tmp_path / "logs", plan_only=False)
    status = chaos_status(request, cache, Console(width=200))
    found: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    assert {name: found[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0), found["troubles"]
    assert status == 0
    return found


def test_every_request_comes_through_a_few_seeds(tmp_path: Path, cache_dir: Path) -> None:
    found = run(tmp_path, cache_dir, seeds=3, first_seed=3, shapes="lean")
    assert found["requests"] == 60
    assert found["alive_when_something_died"]
    assert found["continued"]


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ["tight", "wide"])
def test_every_request_comes_through_more_seeds(shapes: str, tmp_path: Path, cache_dir: Path) -> None:
    run(tmp_path, cache_dir, seeds=6, first_seed=100, shapes=shapes)


@pytest.mark.slow
def test_two_engines_answer_alike_whatever_happens(tmp_path: Path, cache_dir: Path) -> None:
    run(tmp_path, cache_dir, seeds=3, first_seed=200, shapes="lean", engines="jax,jax,torch")
