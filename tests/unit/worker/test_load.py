"""A worker under load, on a real engine: long prompts over running decodes, and a pool that holds half of what is wanted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pddbridge.engine import Engine, EngineConfig, Step, StepUnderWay, start_step
from pddtorch.engine import create
from tests.support.executor_driver import ExecutorDriver
from tests.support.tiny_models import make_tiny_llama

PAGE_SIZE, CHUNK, ROWS = 16, 256, 6
DECODES = {f"d{i}": (20 + i, 110) for i in range(8)}  # name: (prompt tokens, output tokens)
PROMPTS = {f"p{i}": (1500 + i, 60) for i in range(16)}
NEED_PAGES = sum(-(-(prompt + output) // PAGE_SIZE) for prompt, output in (*DECODES.values(), *PROMPTS.values()))
MAX_WAIT_CHUNKS = 2


class Watched:
    """An engine, and of each step which requests had a row and whether a chunk was among them: by the first page of the row."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_chunk_steps = 0
        self.longest_step = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def start_step(self, step: Step, after: StepUnderWay | None = None) -> StepUnderWay:
        self.num_chunk_steps += int((np.diff(step.row_starts) > 1).any())
        self.longest_step = max(self.longest_step, len(step.token_ids))
        return start_step(self._engine, step, after)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("load") / "model", num_heads=6, num_kv_heads=3, max_context=2048)


def driver_of(model_dir: Path, num_pages: int) -> tuple[ExecutorDriver, Watched]:
    config = EngineConfig("cpu", "float32", "float32", PAGE_SIZE, num_pages, 2048, CHUNK, ROWS, 1, None)
    watched = Watched(create(str(model_dir), config))
    return ExecutorDriver(watched, limits=ExecutorLimits(max_decode_wait_chunks=MAX_WAIT_CHUNKS)), watched  # type: ignore[arg-type]


def prompt_of(name: str) -> list[int]:
    length = (DECODES | PROMPTS)[name][0]
    return np.random.default_rng(sum(name.encode()) * 1000 + length).integers(4, 260, length).tolist()


def num_tokens(driver: ExecutorDriver, name: str, first_event: int = 0) -> int:
    return sum(isinstance(event, m.Tokens) for event in driver.events.get(name, [])[first_event:])


def test_long_prompts_over_running_decodes_in_half_the_memory(model_dir: Path) -> None:
    wanted = DECODES | PROMPTS
    driver, watched = driver_of(model_dir, NEED_PAGES // 2)
    for name, (_, output) in DECODES.items():
        driver.open(name, prompt_of(name), max_tokens=output)
    while not all(driver.of(name, m.Tokens) for name in DECODES):
        driver.step()
    for name, (_, output) in PROMPTS.items():
        driver.open(name, prompt_of(name), max_tokens=output)

    waited = dict.fromkeys(DECODES, 0)  # steps with a chunk since a decode's last token
    left = {name: output - num_tokens(driver, name) for name, (_, output) in wanted.items()}
    preempted_at = worst = 0
    for _ in range(10_000):
        chunks, events = watched.num_chunk_steps, {name: len(driver.events.get(name, [])) for name in left}
        if not driver.step():
            break
        if driver.executor._admission.num_preemptions > preempted_at:  # who lost pages waits for them, not behind a chunk
            preempted_at, waited = driver.executor._admission.num_preemptions, dict.fromkeys(DECODES, 0)
        for name in list(left):
            new = num_tokens(driver, name, events[name])
            left[name] -= new
            if name in DECODES:
                waited[name] = 0 if new else waited[name] + watched.num_chunk_steps - chunks
                worst = max(worst, waited[name])
            if left[name] == 0:
                del left[name]
                driver.close(name)
    assert {name: len(driver.log(name)) for name in wanted} == {name: output for name, (_, output) in wanted.items()}
    assert watched.num_chunk_steps > 16 * 1500 / CHUNK
    assert watched.longest_step <= CHUNK
    assert 1 <= worst <= MAX_WAIT_CHUNKS  # six rows for eight decodes and the chunks: somebody did wait
    assert driver.snapshot().preemptions > 0
    driver.assert_idle()

    alone, _ = driver_of(model_dir, NEED_PAGES)
    for name, (_, output) in wanted.items():
        alone.open(name, prompt_of(name), max_tokens=output)
        alone.run()
        assert driver.log(name) == alone.log(name), name
        alone.close(name)
