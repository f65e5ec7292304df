"""Any interleaving of opens, transfers, steps, ingests, seals and closes, with too few pages: tokens stay right, all pages come back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pddbridge.kv_block import room_for
from pddbridge.kv_spec import TokenRange
from tests.support.executor_driver import ExecutorDriver
from tests.support.fake_engine import FakeEngine, blocks_of, expected_log

MAX_TOKENS = 14
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class ExecutorMachine(RuleBasedStateMachine):
    host_pages = 0

    def __init__(self) -> None:
        super().__init__()
        engine = FakeEngine(page_size=3, num_pages=13, max_context=39, max_step_tokens=5, max_rows=3)
        limits = ExecutorLimits(host_cache_bytes=self.host_pages * room_for(engine.kv_spec, 3))
        self.driver = ExecutorDriver(engine, limits=limits)
        self.prompts: dict[str, list[int]] = {}
        self.arrived: dict[str, int] = {}  # first position of what arrived, by request
        self.num_opened = 0

    @rule(prompt=PROMPT, decode=st.booleans(), given_log=st.integers(0, 4), tenant=st.sampled_from("xy"), transfer=st.booleans())
    def open(self, prompt: list[int], decode: bool, given_log: int, tenant: str, transfer: bool) -> None:
        if len(self.prompts) == 5:
            return
        request_id = f"r{self.num_opened}"
        self.num_opened += 1
        self.prompts[request_id] = prompt
        log = expected_log(prompt, given_log)
        self.driver.open(request_id, prompt, log=log, decode=decode, max_tokens=MAX_TOKENS, tenant=tenant, transfer=transfer)

    @rule(data=st.data(), complete=st.booleans())
    def receive(self, data: st.DataObject, complete: bool) -> None:
        """A piece of some awaited KV arrives, from the end; ``complete``: all that is left."""
        waiting = [name for name in sorted(self.prompts) if self.missing(name) is not None]
        if waiting:
            self.place(data.draw(st.sampled_from(waiting)), complete)

    def missing(self, request_id: str) -> TokenRange | None:
        """What has not arrived yet of what Reserved asked for; None when nothing is awaited."""
        reserved = self.driver.of(request_id, m.Reserved)
        if not reserved or reserved[0].missing is None or self.driver.of(request_id, m.KvComplete):
            return None
        return TokenRange(reserved[0].missing.start, self.arrived.get(request_id, reserved[0].missing.stop))

    def place(self, request_id: str, complete: bool) -> None:
        missing = self.missing(request_id)
        assert missing is not None
        start = missing.start if complete else max(missing.start, missing.stop - 4)
        self.driver.place(request_id, blocks_of(self.prompts[request_id], TokenRange(start, missing.stop)))
        self.arrived[request_id] = start
        if start == missing.start:
            self.driver.executor.handle(m.TransferComplete(request_id, 0, 0))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule(data=st.data(), length=st.integers(0, MAX_TOKENS), decode=st.booleans())
    def ingest(self, data: st.DataObject, length: int, decode: bool) -> None:
        if self.prompts:
            request_id = data.draw(st.sampled_from(sorted(self.prompts)))
            self.driver.ingest(request_id, 0, expected_log(self.prompts[request_id], length), decode)

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        if self.prompts:
            self.driver.seal(data.draw(st.sampled_from(sorted(self.prompts))))

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.prompts:
            self.end(data.draw(st.sampled_from(sorted(self.prompts))))

    def end(self, request_id: str) -> None:
        self.driver.close(request_id)
        del self.prompts[request_id]

    @invariant()
    def nothing_is_wrong(self) -> None:
        self.driver.executor.check()
        for request_id, prompt in self.prompts.items():
            assert not self.driver.of(request_id, m.Failed)
            log = expected_log(prompt, MAX_TOKENS)
            for event in self.driver.of(request_id, m.Tokens):
                assert [r.token_id for r in event.records] == log[event.position : event.position + 1]

    def is_finished(self, request_id: str) -> bool:
        self.driver.seal(request_id)
        return self.driver.of(request_id, m.Sealed)[-1] == m.Sealed(MAX_TOKENS)

    def teardown(self) -> None:
        # As long as transfers go through and what is finished is closed, everyone ends: nobody is stuck for want of pages.
        while self.prompts:
            for request_id in self.prompts:
                self.driver.ingest(request_id, 0, [], decode=True)
            self.driver.run()
            waiting = [name for name in sorted(self.prompts) if self.missing(name) is not None]
            for request_id in waiting:
                self.place(request_id, complete=True)
            finished = [name for name in sorted(self.prompts) if self.is_finished(name)]
            for request_id in finished:
                self.end(request_id)
            assert waiting or finished
        self.driver.run()
        self.driver.assert_idle()


class TwoTierMachine(ExecutorMachine):
    """Host memory for a few pages more."""

    host_pages = 7


ExecutorMachine.TestCase.settings = TwoTierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestExecutor = ExecutorMachine.TestCase
TestTwoTiers = TwoTierMachine.TestCase
