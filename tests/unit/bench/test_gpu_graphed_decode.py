"""What `make gpu` checks of recorded decode steps, tried on the CPU: it passes on what is right and fails on what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pddtorch.engine
from benchmarks.gpu import graphed_decode
from benchmarks.gpu.sizes import SMALL
from pddbridge.engine import Engine, EngineConfig, Step
from pddbridge.model_spec import ModelSpec
from pddbridge.random_checkpoint import RandomCheckpoint
from pddtorch.decode_graphs import DecodeGraph, DecodeGraphs
from pddtorch.engine import TorchEngine
from tests.support.fixed_ops import FixedOps
from tests.support.recorders import OpRecorder

CPU = torch.device("cpu")


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> graphed_decode.Make:
    """Engines whose decode steps are recorded by a stand-in for CUDA."""
    monkeypatch.setattr(pddtorch.engine, "_open_native", lambda device, cache_dir: (None, {}))
    monkeypatch.setattr(pddtorch.engine, "choose", lambda problem, device, native: FixedOps(problem, device, {}))
    for name, fewer in {"_CONTEXT": 80, "_CONTEXTS": (0, 1, 11, 12, 60), "_MAX_ROWS": 3, "_NUM_ROWS": (1, 3, 2), "_AHEAD_AT": 40}.items():
        monkeypatch.setattr(graphed_decode, name, fewer)

    def make(spec: ModelSpec, config: EngineConfig, seed: int) -> Engine:
        checkpoint = RandomCheckpoint(spec, seed, config.compute_dtype)
        return TorchEngine(checkpoint, config, OpRecorder() if config.decode_graphs else None)

    return make


def test_replayed_decode_steps_are_checked_and_timed_in_pairs(replaying: graphed_decode.Make) -> None:
    findings = graphed_decode.run("cpu", CPU, SMALL, 1, 0, replaying)
    assert not [finding.what for finding in findings if finding.status == "failed"]
    named = {finding.what: finding for finding in findings}
    assert named["tiny, 2 of 3 layers: decode, 3 streams"].numbers.keys() == {
        f"{ahead}{number}" for ahead in ("", "ahead_") for number in ("graphed_tokens_s", "eager_tokens_s", "ratio")
    }
    assert all(number > 0 for number in named["tiny, 2 of 3 layers: decode, 1 streams"].numbers.values())
    assert [finding.status for finding in findings].count("passed") == 6


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("pages", {"logits of replayed steps", "KV that no row writes", "tokens of replayed steps, started ahead"}),
        ("fed", {"tokens of replayed steps, started ahead"}),
        ("never", {"every step of decode rows is replayed"}),
    ],
)
def test_replayed_decode_checks_fail_on_what_is_wrong(
    fault: str, failed: set[str], replaying: graphed_decode.Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = DecodeGraph.run
    if fault == "pages":

        def elsewhere(self: DecodeGraph, step: Step, fed: torch.Tensor | None) -> torch.Tensor | None:
            return run(self, replace(step, page_tables=(step.page_tables + 1) % 24), fed)

        monkeypatch.setattr(DecodeGraph, "run", elsewhere)
    elif fault == "fed":
        monkeypatch.setattr(DecodeGraph, "run", lambda self, step, fed: run(self, step, None))
    else:
        monkeypatch.setattr(DecodeGraphs, "record_all", lambda self: iter(()))
    found = graphed_decode.check("cpu", 1, 0, replaying)
    assert {finding.what for finding in found if finding.status == "failed"} == failed
