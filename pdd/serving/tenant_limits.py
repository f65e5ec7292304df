"""What each tenant may use at once and per minute, held at the one place that every door's requests pass: before the coordinator."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from pdd.errors import Code, PddError
from pdd.serving.accounts import Accounts
from pdd.serving.front import Generator, ModelLimits
from pdd.serving.request import Delta, GenerationRequest

_MINUTE_S: Final = 60.0
# How long a generation that ends may take, for a client that is refused because of too many: nobody knows, and soon is polite.
_CONCURRENT_RETRY_S: Final = 1.0


@dataclass
class _Bucket:
    """``tokens`` may be used at ``at_s``, monotonic; below 0 what was used is still being earned."""

    tokens: float
    at_s: float


class TenantLimits:
    """A Generator that refuses what goes beyond a tenant's limits, and passes the rest on to another one.

    Tokens are charged when they are known: the prompt's at the start, the output's as it comes. So a tenant can overdraw by what runs, and
    then waits until that is earned back.
    """

    def __init__(self, inner: Generator, accounts: Accounts, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_refused: Counter[tuple[str, str]] = Counter()  # by tenant and "concurrent" or "tokens"
        self._inner = inner
        self._accounts = accounts
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}

    @property
    def limits(self) -> ModelLimits:
        return self._inner.limits

    def running(self, tenant: str) -> int:
        return self._running[tenant]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """As the inner generator. Raises PddError RESOURCE_EXHAUSTED, with when to try again, before the first delta."""
        tenant = request.tenant.partition("/")[0]  # what follows is a salt of its own
        self._take(tenant, len(request.prompt_ids))
        try:
            async with aclosing(self._inner.generate(request)) as deltas:
                async for delta in deltas:
                    self._charge(tenant, len(delta.records))
                    yield delta
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]

    def _take(self, tenant: str, prompt_tokens: int) -> None:
        entry = self._accounts.tenant(tenant)
        if entry is not None and entry.max_concurrent is not None and self._running[tenant] >= entry.max_concurrent:
            self.num_refused[tenant, "concurrent"] += 1
            message = f"too many requests at once: this key's tenant may have {entry.max_concurrent}"
            raise PddError(Code.RESOURCE_EXHAUSTED, message, retry_after_s=_CONCURRENT_RETRY_S)
        if entry is not None and entry.tokens_per_minute is not None:
            bucket = self._earned(tenant, entry.tokens_per_minute)
            if bucket.tokens <= 0:
                self.num_refused[tenant, "tokens"] += 1
                wait_s = (1 - bucket.tokens) * _MINUTE_S / entry.tokens_per_minute
                message = f"too many tokens: this key's tenant may use {entry.tokens_per_minute} per minute"
                raise PddError(Code.RESOURCE_EXHAUSTED, message, retry_after_s=wait_s)
        self._running[tenant] += 1
        self._charge(tenant, prompt_tokens)

    def _charge(self, tenant: str, tokens: int) -> None:
        entry = self._accounts.tenant(tenant)
        if entry is not None and entry.tokens_per_minute is not None:
            self._earned(tenant, entry.tokens_per_minute).tokens -= tokens

    def _earned(self, tenant: str, per_minute: int) -> _Bucket:
        """The tenant's bucket, brought up to now."""
        now_s = self._clock()
        bucket = self._buckets.setdefault(tenant, _Bucket(per_minute, now_s))
        bucket.tokens = min(per_minute, bucket.tokens + (now_s - bucket.at_s) * per_minute / _MINUTE_S)
        bucket.at_s = now_s
        return bucket
