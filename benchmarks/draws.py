"""What drawing tokens on a device costs beside the host's sampler, and how often it leaves the host to decide.

``python benchmarks/draws.py --json FILE``. The devices are the CPUs that torch and JAX have here, with one thread: how fast an accelerator
draws is not told, only that a CPU had better not. How often rounding leaves doubt is told for both kinds of weights: torch's are float64,
JAX's float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from pddbridge.choice import Choice
from pddbridge.draw_plan import DrawArrays
from pddbridge.engine import SampleRow
from pddbridge.sampling import sample_plain
from pddbridge.sampling_params import SamplingParams

VOCAB: Final = 49152
ROWS: Final = 8
PLAIN: Final = SamplingParams(seed=1, max_tokens=1)
KINDS: Final = {
    "temperature 1": PLAIN,
    "temperature 0.7, top-p 0.95": replace(PLAIN, temperature=0.7, top_p=0.95),
    "top-k 50, min-p 0.02": replace(PLAIN, top_k=50, min_p=0.02),
    "temperature 5": replace(PLAIN, temperature=5.0),
}
Draw = Callable[[np.ndarray, DrawArrays], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Measured:
    """Microseconds per row, medians over batches of ``ROWS`` rows; ``doubts`` of ``rows`` were left to the host, ``wrong`` of the others
    are not its tokens.
    """

    device: str
    kind: str
    host_us: float
    device_us: float
    rows: int
    doubts: int
    wrong: int


def torch_device() -> tuple[Draw, float]:
    import torch

    from pddtorch.draw import draw, measured_error

    torch.set_num_threads(1)

    def run(logits: np.ndarray, plan: DrawArrays) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            values = torch.from_numpy(logits)
            highest, ids = values.max(1)
            drawn, margins = draw(values, highest, ids, plan)
        return drawn.numpy(), margins.numpy()

    return run, measured_error(torch.device("cpu"))


def jax_device() -> tuple[Draw, float]:
    import jax
    import jax.numpy as jnp

    from pddjax.draw import draw, measured_error

    compiled: list[jax.stages.Compiled] = []

    def run(logits: np.ndarray, plan: DrawArrays) -> tuple[np.ndarray, np.ndarray]:
        arguments = (jnp.asarray(np.ascontiguousarray(logits.T)), logits.max(1), logits.argmax(1).astype(np.int32), plan)
        if not compiled:
            with jax.enable_x64(True):
                compiled.append(jax.jit(draw).lower(*arguments).compile())
        drawn, margins = compiled[0](*arguments)
        return np.asarray(drawn), np.asarray(margins)

    return run, measured_error(jax.devices("cpu")[0])


def measure(device: str, draw: Draw, error: float, kind: str, params: SamplingParams, batches: int) -> Measured:
    random = np.random.default_rng(2)
    times: dict[str, list[float]] = {"host": [], "device": []}
    doubts = wrong = 0
    nothing = np.zeros(0, np.int32)
    for batch in range(batches):
        logits = random.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
        rows = tuple(SampleRow(i, i, replace(params, seed=batch), nothing, nothing) for i in range(ROWS))
        choice = Choice.of(rows, True, VOCAB, error)
        assert choice.draws is not None
        began = time.perf_counter()
        ids, margins = draw(logits, choice.draws.arrays)
        times["device"].append(time.perf_counter() - began)
        began = time.perf_counter()
        wanted = [sample_plain(logits[i], row.params, row.position).token_id for i, row in enumerate(rows)]
        times["host"].append(time.perf_counter() - began)
        sure = margins > choice.draws.tolerances
        doubts += int((~sure).sum())
        wrong += int((sure & (ids != wanted)).sum())
    host, there = (statistics.median(times[side][1:]) / ROWS * 1e6 for side in ("host", "device"))  # the first compiles
    return Measured(device, kind, round(host, 1), round(there, 1), batches * ROWS, doubts, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description="the host's sampler and drawing on a device, side by side")
    parser.add_argument("--batches", type=int, default=40, help="of 8 rows, per kind of sampling")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    console, found = Console(), []
    for device, make in (("torch", torch_device), ("jax", jax_device)):
        draw, error = make()
        for kind, params in KINDS.items():
            found.append(one := measure(device, draw, error, kind, params, arguments.batches))
            console.print(f"{device}, {kind}: host {one.host_us} us, device {one.device_us} us a row; in doubt {one.doubts} of {one.rows}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if any(one.wrong for one in found):
        raise SystemExit("a token that was sure is not the host's")


if __name__ == "__main__":
    main()
