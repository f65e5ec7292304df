"""Which requests may be finished on the relay, with nothing sent to main, and how many. Never a normal pipeline: main's cache would fall
behind prefill's, which sends more to the relay, which overloads it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

# Why a request that the relay would end before main has its KV is none the less not local.
LocalRefusal = Literal["off", "shared", "short_prompt", "long_answer", "unmeasured", "relay_busy", "kv_sooner"]


@dataclass(frozen=True)
class LocalLimits:
    """Of :class:`pdd.policy_config.LocalConfig`."""

    min_miss_tokens: int
    max_output_tokens: int
    margin: float
    max_relay_load: float


@dataclass(frozen=True)
class LocalQuestion:
    """``allowed``: the share of local requests leaves room · ``shared``: others with the same prompt run · ``output_tokens``: predicted,
    at most · ``relay_s_per_token``: None: nothing is known of the relay's pace · ``relay_load``: share of its rows in use by others ·
    ``wait_s``: until main's KV is there, beyond prefill; None: the link is unmeasured.
    """

    allowed: bool
    shared: bool
    miss_tokens: int
    output_tokens: int
    relay_s_per_token: float | None
    relay_load: float
    wait_s: float | None


def refuse_local(question: LocalQuestion, limits: LocalLimits) -> LocalRefusal | None:
    """None: the request is singular, and the relay ends it well before main could begin."""
    if question.miss_tokens < limits.min_miss_tokens:
        return "short_prompt"
    if question.output_tokens > limits.max_output_tokens:
        return "long_answer"
    if not question.allowed:
        return "off"
    if question.shared:
        return "shared"
    if question.relay_load > limits.max_relay_load:
        return "relay_busy"
    if question.relay_s_per_token is None or question.wait_s is None:
        return "unmeasured"
    if question.wait_s < limits.margin * question.output_tokens * question.relay_s_per_token:
        return "kv_sooner"
    return None


class LocalQuota:
    """Of any ``window`` requests in a row at most ``max_share`` are let be local. Once that many are, none is until half of them have
    left the window: so the relay does not stay at the bound.
    """

    def __init__(self, max_share: float, window: int) -> None:
        self._most = int(max_share * window + 1e-9)
        self._latest: deque[bool] = deque()
        self._num_local = 0
        self._window = window
        self._closed = self._most == 0

    @property
    def num_local(self) -> int:
        """In the window."""
        return self._num_local

    @property
    def share(self) -> float:
        return self.num_local / self._window

    @property
    def open(self) -> bool:
        """Whether the next request may be local."""
        return not self._closed

    def record(self, is_local: bool) -> None:
        """The next request was decided. One that was forced counts, too."""
        self._latest.append(is_local)
        self._num_local += is_local
        if len(self._latest) > self._window:
            self._num_local -= self._latest.popleft()
        if self._most == 0:
            return
        if self.num_local >= self._most:
            self._closed = True
        elif self.num_local <= self._most // 2:
            self._closed = False
