"""KV on its way to main under the virtual clock, and what a coordinator knows of it: what it ordered, at the rate that a sender sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import simpy

from pdd.policy.link import LinkSnapshot
from pdd.policy.link_queue import LinkQueue
from pdd.policy.link_schedule import Priority
from pdd.policy.pipeline import expected_goodput_bytes_s
from pdd.sim.goodput import SeenRate
from pdd.sim.link import make_link
from pdd.sim.running import Running
from pdd.sim.spec import SystemSpec


class Sending:
    """``changed``: is told when the link may have begun or stopped to move something."""

    def __init__(self, env: simpy.Environment, spec: SystemSpec, changed: Callable[[], None]) -> None:
        self.link = make_link(env, spec.link)
        self._env = env
        self._spec = spec
        self._changed = changed
        self._flow_bytes_s = (spec.link.flow_bytes_s or spec.link.rate_bytes_s) / spec.link.coded_share  # of one transfer alone
        self._traffic = LinkQueue(spec.link.schedule)
        self._under_way: Counter[tuple[str, str]] = Counter()  # transfers, by prefill and main
        self._of_sender: Counter[str] = Counter()  # likewise, by prefill
        self._seen = SeenRate(lambda: env.now, lambda: self.link.busy, spec.link.rtt_s + spec.overheads.link_s)
        self.link.on_busy = self._link_changed

    @property
    def goodput_bytes_s(self) -> float:
        """That a transfer alone is seen to get."""
        return self._flow_bytes_s * self._seen.share

    def towards(self, run: Running) -> LinkSnapshot:
        """Of the link from the run's prefill to its main."""
        return self.snapshot(self._under_way[run.pair])

    def snapshot(self, num: int) -> LinkSnapshot:
        """As one sending end measures it towards one receiver, to whom its transfers take turns, live: what one of them may get at most,
        and no more than the part of a shared line of ``num`` and one more. Of an idle one what it was alone.
        """
        line_bytes_s = self.link.rate_bytes_s
        if num:
            line_bytes_s *= (num + 1) / (self.link.num_transfers + 1)
        return LinkSnapshot(
            goodput_bytes_s=min(line_bytes_s, self._flow_bytes_s) * self._seen.share,
            round_trip_s=self._spec.link.rtt_s,
            queued_bytes=round(self.link.queued_bytes),
            num_transfers=num,
        )

    def beside(self, run: Running, background_bytes: float) -> LinkSnapshot:
        """What a transfer in the background is asked about: the link as it is, with what others wait for besides ``background_bytes``."""
        link = self.snapshot(self.link.num_transfers)
        self._advance()
        waited_for_bytes = self._traffic.remaining_bytes(background=False, besides=run)
        return replace(link, queued_bytes=round(waited_for_bytes + background_bytes))

    def ahead_bytes(self, run: Running, link: LinkSnapshot) -> float:
        """Of other transfers, that go before what the run's main lacks, if somebody waits for that, as a coordinator tells."""
        self._advance()
        num_bytes = run.main_miss * self._spec.kv_bytes_per_token
        expected_bytes_s = expected_goodput_bytes_s(self.goodput_bytes_s, link) or 0.0
        return self._traffic.ahead_bytes(num_bytes, Priority.URGENT, run.prefill.name, expected_bytes_s)

    def _advance(self) -> None:
        """By what each sender sees that its transfers get."""
        total = self._of_sender.total()
        each_bytes_s = min(self.link.rate_bytes_s / total, self._flow_bytes_s) * self._seen.share if total else 0.0
        self._traffic.advance(self._env.now, {sender: each_bytes_s * num for sender, num in self._of_sender.items() if num})

    def begin(self, run: Running, priority: Priority) -> None:
        """``run.arrival`` succeeds when what main lacked is at main: what prefill has goes at once, the rest as it is computed."""
        if run.main_miss == 0:
            run.arrival.succeed()
            return
        assert run.job is not None
        run.kv_bytes = run.main_miss * self._spec.kv_bytes_per_token
        run.ordered_s = self._env.now
        run.transfer = self.link.open(run.kv_bytes, lambda: self._sent(run), priority)
        self._traffic.add(run, run.kv_bytes, priority, run.prefill.name)
        self._under_way[run.pair] += 1
        self._of_sender[run.prefill.name] += 1
        self.feed(run, run.job.behind - run.main_hit)

    def feed(self, run: Running, tokens: int) -> None:
        """Tokens of the prompt that main lacks and prefill has; none for those that main holds."""
        if run.transfer is not None and tokens > 0:
            self.link.feed(run.transfer, tokens * self._spec.kv_bytes_per_token)

    def set_priority(self, run: Running, priority: Priority) -> None:
        """No effect on one that is over."""
        if run.transfer is not None and run.transfer.active:
            self.link.set_priority(run.transfer, priority)
            self._traffic.set_priority(run, priority)

    def stop(self, run: Running) -> None:
        if run.transfer is not None and run.transfer.active:
            self.link.cancel(run.transfer)
            self._ended(run)

    def _sent(self, run: Running) -> None:
        overheads = self._spec.overheads
        link_s = overheads.link_busy_s if run.main.engine.num_jobs else overheads.link_s
        run.arrival.succeed_in(self._spec.link.rtt_s / 2 + link_s)
        self._ended(run)

    def _ended(self, run: Running) -> None:
        self._traffic.remove(run)
        self._under_way[run.pair] -= 1
        self._of_sender[run.prefill.name] -= 1

    def _link_changed(self) -> None:
        self._seen.look()
        self._changed()
