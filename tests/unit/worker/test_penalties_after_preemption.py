"""Case 61 at a worker: penalties come from (prompt, log), so neither a handoff at any token nor a lost pool changes what is sampled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pddbridge.engine import EngineConfig
from pddbridge.sampling_params import SamplingParams
from pddtorch.engine import create
from tests.support.executor_driver import ExecutorDriver
from tests.support.tiny_models import make_tiny_llama

PENALISED = SamplingParams(
    seed=5, max_tokens=24, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, ignore_eos=True
)
PROMPTS = {"old": [(37 * i) % 290 + 5 for i in range(17)], "young": [(41 * i) % 290 + 5 for i in range(15)]}


def driver_of(model_dir: Path, num_pages: int) -> ExecutorDriver:
    # Where native kernels are kept between runs: they take a while to build.
    compiled = Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pdd") / "compiled" / "torch"
    return ExecutorDriver(create(str(model_dir), EngineConfig("cpu", "float32", "float32", 8, num_pages, 64, 16, 4, 1, str(compiled))))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("penalties") / "model", num_heads=6, num_kv_heads=3, max_context=64)


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> dict[str, list[int]]:
    logs = {}
    driver = driver_of(model_dir, 40)
    for name, prompt in PROMPTS.items():
        driver.open(name, prompt, params=PENALISED)
        driver.run()
        logs[name] = driver.log(name)
        driver.close(name)
    return logs


def test_a_preempted_request_samples_what_it_would_have(model_dir: Path, alone: dict[str, list[int]]) -> None:
    driver = driver_of(model_dir, 8)  # two need six pages each
    for name, prompt in PROMPTS.items():
        driver.open(name, prompt, params=PENALISED)
    waiting = set(PROMPTS)
    for _ in range(300):
        driver.step()
        for name in [name for name in waiting if len(driver.log(name)) == PENALISED.max_tokens]:
            driver.close(name)
            waiting.remove(name)
    assert driver.snapshot().preemptions >= 1
    assert {name: driver.log(name) for name in PROMPTS} == alone
    plain = driver_of(model_dir, 40)
    plain.open("old", PROMPTS["old"], params=SamplingParams(seed=5, max_tokens=24, temperature=0.9, ignore_eos=True))
    plain.run()
    assert plain.log("old") != alone["old"]  # or the penalties would not be tried


@pytest.mark.parametrize("handoff", range(9))
def test_whoever_continues_from_the_log_samples_what_the_first_would_have(
    model_dir: Path, alone: dict[str, list[int]], handoff: int
) -> None:
    driver = driver_of(model_dir, 40)
    driver.open("r", PROMPTS["old"], log=alone["old"][:handoff], params=PENALISED)
    driver.run()
    assert [*alone["old"][:handoff], *driver.log("r")] == alone["old"]
