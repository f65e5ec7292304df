"""Any interleaving of opens, steps, ingests, seals and closes, with far too few pages: tokens stay right and every page comes back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdd.worker import messages as m
from tests.support.executor_driver import ExecutorDriver
from tests.support.fake_engine import FakeEngine, expected_log

MAX_TOKENS = 14
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class ExecutorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = ExecutorDriver(FakeEngine(page_size=3, num_pages=13, max_context=39, max_step_tokens=5, max_rows=3))
        self.prompts: dict[str, list[int]] = {}
        self.num_opened = 0

    @rule(prompt=PROMPT, decode=st.booleans(), given_log=st.integers(0, 4), tenant=st.sampled_from("xy"))
    def open(self, prompt: list[int], decode: bool, given_log: int, tenant: str) -> None:
        if len(self.prompts) == 5:
            return
        request_id = f"r{self.num_opened}"
        self.num_opened += 1
        self.prompts[request_id] = prompt
        log = expected_log(prompt, given_log)
        self.driver.open(request_id, prompt, log=log, decode=decode, max_tokens=MAX_TOKENS, tenant=tenant)

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

    def teardown(self) -> None:
        # Closed one by one, each of the others must be able to end: nobody is stuck for want of pages.
        for request_id in sorted(self.prompts, key=lambda name: int(name[1:])):
            self.driver.ingest(request_id, 0, [], decode=True)
            self.driver.run()
            self.driver.seal(request_id)
            assert self.driver.of(request_id, m.Sealed)[-1] == m.Sealed(MAX_TOKENS)
            self.end(request_id)
        self.driver.run()
        self.driver.assert_idle()


ExecutorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestExecutor = ExecutorMachine.TestCase
