"""What the reader sees of a handoff, per mode: the largest gap around main's first token, from three before it to four behind, over the
median gap of the answer.

``python benchmarks/handoff_modes.py --config configs/local.yaml --rounds 5 --json FILE``. The modes take turns, each request has a prefix
cache of its own, and all are forced through the relay. Times are taken at the client.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console

from pdd.config import load
from pdd.launch.ask import Answer, ask
from pdd.launch.local import Deployment
from pdd.launch.serve import StartProgress
from pdd.models import resolve
from pddbridge.checkpoint import open_checkpoint

MODES = ("one_shot", "catch_up", "overlap")
# Gaps before and behind main's first token belong to the seam too: what is gained there must not be lost beside it.
BEFORE, AFTER = 3, 5


@dataclass(frozen=True)
class Seen:
    """Seconds. ``largest_s``: gap at the seam · ``median_s``: of all gaps · ``elsewhere_s``: the largest gap that has nothing to
    do with the handoff, which is what the machine adds by itself · ``handoff_ms``: every gap from the start of the handoff to main's fifth.
    """

    largest_s: float
    median_s: float
    elsewhere_s: float
    relay_tokens: int
    duplicates: int
    rewinds: int
    handoff_ms: tuple[int, ...]

    @property
    def ratio(self) -> float:
        return self.largest_s / self.median_s


def seen(answer: Answer) -> Seen | None:
    """None when main came too late to take over."""
    origins = [piece.origin for piece in answer.pieces]
    if "main" not in origins:
        return None
    first = origins.index("main")
    times = [piece.at_s for piece in answer.pieces]
    gaps = [b - a for a, b in pairwise(times)]
    began_s = float(answer.timeline["handoff_start_s"] or 0.0)
    handoff = [gap for n, gap in enumerate(gaps[: first + AFTER]) if times[n + 1] >= began_s]
    others = [gap for n, gap in enumerate(gaps) if n >= first + AFTER or times[n + 1] < began_s]
    counted = [int(answer.timeline.get(name) or 0) for name in ("handoff_duplicates", "handoff_rewinds")]
    return Seen(
        max(gaps[max(0, first - BEFORE) : first + AFTER]),
        float(np.median(gaps)),
        max(others, default=0.0),
        answer.tokens_by("relay"),
        *counted,
        tuple(round(1000 * gap) for gap in handoff),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/local.yaml"))
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "pdd")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input-len", type=int, default=400)
    parser.add_argument("--output-len", type=int, default=160)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--pace", type=float, default=None, help="policy.handoff_rules.pace")
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    config = load(given.config)
    raw = config.model_dump(mode="json")
    raw["serving"].update(http_port=None, grpc_port=None, allow_override=True)
    raw["start_timeout_s"] = given.start_timeout
    if given.pace is not None:
        raw["policy"]["handoff_rules"]["pace"] = given.pace
    config = type(config).model_validate(raw)
    vocab_size = open_checkpoint(resolve(config.model, given.cache_dir)).spec.vocab_size
    rng = np.random.default_rng(1)
    found: dict[str, list[Seen]] = {mode: [] for mode in given.modes}
    with Deployment(config, given.cache_dir) as deployment:
        progress = StartProgress(Console(stderr=True))
        with progress.bars:
            deployment.start_workers()
            deployment.wait_ready(time.monotonic() + config.start_timeout_s, progress)
            deployment.start_coordinator("coordinator", config, deployment.topology)
            deployment.wait_ready(time.monotonic() + config.start_timeout_s, progress)
        url = f"http://{deployment.topology.http}/v1/completions"
        for number in range(given.rounds + 1):
            for mode in given.modes:
                prompt = rng.integers(vocab_size // 2, vocab_size, size=given.input_len).tolist()
                body = {"model": config.model, "prompt": prompt, "cache_salt": f"{number}-{mode}", "max_tokens": given.output_len}
                course = {"ignore_eos": True, "temperature": 0, "pdd": {"pipeline": "relay", "handoff": mode}}
                one = seen(ask(url, {**body, **course}))
                if number > 0 and one is not None:  # the first round warms up
                    found[mode].append(one)
                    print(f"{mode:9} ratio {one.ratio:5.2f}  {one}", flush=True)
    rows = {
        mode: {
            "ratio_median": float(np.median([s.ratio for s in all_seen])),
            "ratio_worst": max(s.ratio for s in all_seen),
            "elsewhere_ratio_median": float(np.median([s.elsewhere_s / s.median_s for s in all_seen])),
            "largest_ms": [round(1000 * s.largest_s, 1) for s in all_seen],
            "median_itl_ms": round(1000 * float(np.median([s.median_s for s in all_seen])), 1),
            "duplicates": [s.duplicates for s in all_seen],
            "rewinds": sum(s.rewinds for s in all_seen),
        }
        for mode, all_seen in found.items()
        if all_seen
    }
    report = {"load_average": os.getloadavg()[0], "cores": os.cpu_count(), "modes": rows}
    print(json.dumps(report, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
