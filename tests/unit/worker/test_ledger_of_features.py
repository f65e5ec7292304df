"""Case 29: free + cached + pinned = total after every step, with every choice of prefix cache, host tier, preemption and imported KV.

One feature alone keeps its books easily; the reported fault needed two. Without the prefix cache there is nothing for a host tier to keep.
"""

from __future__ import annotations

import itertools
import random

import pytest

from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pddbridge.kv_block import room_for
from pddbridge.kv_spec import TokenRange
from tests.support.executor_driver import ExecutorDriver
from tests.support.fake_engine import KV_SPEC, FakeEngine, blocks_of, expected_log

SIZE, MAX_TOKENS, NUM_REQUESTS, AT_ONCE = 3, 10, 60, 4
FEATURES = [f for f in itertools.product((False, True), repeat=4) if f[0] or not f[1]]


class Traffic:
    """Requests of few different beginnings, opened, received, stepped and closed at random; ``check`` after every step."""

    def __init__(self, driver: ExecutorDriver, imports: bool, seed: int) -> None:
        self.driver = driver
        self.imports = imports
        self.rng = random.Random(seed)
        self.prompts: dict[str, list[int]] = {}
        self.num_opened = 0
        self.num_imported = 0

    def run(self) -> None:
        while self.num_opened < NUM_REQUESTS or self.prompts:
            if self.num_opened < NUM_REQUESTS and len(self.prompts) < AT_ONCE and self.rng.random() < 0.4:
                self.open()
            for name in list(self.prompts):
                self.receive(name)
            self.driver.step()
            for name in list(self.prompts):
                self.end(name)

    def open(self) -> None:
        name = f"r{self.num_opened}"
        self.num_opened += 1
        prompt = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 14))]
        transfer = self.imports and self.rng.random() < 0.6
        self.driver.open(name, prompt, max_tokens=MAX_TOKENS, transfer=transfer, tenant=self.rng.choice("xy"))
        self.prompts[name] = prompt

    def receive(self, name: str) -> None:
        """The KV that it awaits comes a while later, if it lives so long."""
        reserved = self.driver.of(name, m.Reserved)
        if not reserved or reserved[0].missing is None or self.driver.of(name, m.KvComplete) or self.rng.random() < 0.7:
            return
        missing = reserved[0].missing
        for at in range(missing.start, missing.stop, 4):
            self.driver.place(name, blocks_of(self.prompts[name], TokenRange(at, min(at + 4, missing.stop))))
            self.driver.executor.check()
        self.driver.executor.handle(m.TransferComplete(name, 0, 0))
        self.driver.executor.check()
        self.num_imported += 1

    def end(self, name: str) -> None:
        """Those that are through, and some that are not."""
        prompt, log = self.prompts[name], self.driver.log(name)
        assert not self.driver.of(name, m.Failed)
        assert log == expected_log(prompt, len(log))
        if len(log) == MAX_TOKENS or self.rng.random() < 0.02:
            self.driver.close(name)
            del self.prompts[name]


@pytest.mark.parametrize(("radix", "offload", "preemption", "imports"), FEATURES)
def test_the_ledger_holds_after_every_step(radix: bool, offload: bool, preemption: bool, imports: bool) -> None:
    num_pages = 13 if preemption else 40
    engine = FakeEngine(page_size=SIZE, num_pages=num_pages, max_context=SIZE * 13, max_step_tokens=6, max_rows=3)
    limits = ExecutorLimits(host_cache_bytes=7 * room_for(KV_SPEC, SIZE) if offload else 0)
    traffic = Traffic(ExecutorDriver(engine, radix, limits), imports, seed=29)
    traffic.run()
    traffic.driver.assert_idle()
    snapshot = traffic.driver.snapshot()
    # Each feature had its part, or was off.
    assert (snapshot.pages.cached > 0) is radix
    assert (snapshot.host.stored > 0) is offload
    assert (snapshot.preemptions > 0) is preemption
    assert (traffic.num_imported > 0) is imports
