"""What the coordinator learned from requests that ran: lengths of answers, paces of workers, hit rates, how many were local. Bounded."""

from __future__ import annotations

import time

from pdd.policy.alignment import HitWindow
from pdd.policy.estimates import Lateness, Ratio
from pdd.policy.lengths import LengthEstimator
from pdd.policy.local import LocalQuota
from pdd.policy_config import PolicyConfig
from pdd.serving.link_estimate import Link

# After so many more tokens an old pace has lost half its weight.
_PREFILL_HALF_LIFE_TOKENS = 20_000
_RELAY_HALF_LIFE_TOKENS = 500


def account(tenant: str) -> str:
    """Whose answers are alike: a tenant without the salt that divides its caches further."""
    return tenant.partition("/")[0]


class Learned:
    """``relay_s``: seconds per token on relays, as requests see them · ``computed``: share of what main lacked that prefill had to compute,
    too, rather than finding it.
    """

    def __init__(self, policy: PolicyConfig) -> None:
        lengths = policy.lengths
        self.lengths = LengthEstimator(lengths.quantile, lengths.min_samples, lengths.half_life, lengths.max_tenants)
        self.hits = HitWindow(policy.alignment.window, policy.alignment.window_s)
        self.quota = LocalQuota(policy.local.max_share, policy.local.window)
        self.relay_s = Ratio(_RELAY_HALF_LIFE_TOKENS)
        self.computed = Ratio(_PREFILL_HALF_LIFE_TOKENS)
        self._prefill_s: dict[str, Ratio] = {}
        self._late: dict[Link, Lateness] = {}
        self._lateness = (policy.lateness_half_life_s, policy.max_lateness_s)

    def prefill_s_per_token(self, worker: str) -> float | None:
        """Of ``worker``, waiting for its turn there included; None until it has computed something."""
        pace = self._prefill_s.get(worker)
        return None if pace is None else pace.value

    def prefilled(self, worker: str, computed_tokens: int, took_s: float) -> None:
        """Prefill has computed ``computed_tokens``, ``took_s`` after it was opened."""
        self._prefill_s.setdefault(worker, Ratio(_PREFILL_HALF_LIFE_TOKENS)).observe(took_s, computed_tokens)

    def arrived(self, route: Link, error_s: float) -> None:
        """Main's KV came to a direct request over ``route``, ``error_s`` later than the figures alone had said."""
        self._late.setdefault(route, Lateness(*self._lateness)).observe(time.monotonic(), error_s)

    def late_s(self, route: Link) -> float:
        """By how much KV comes later over ``route`` than the figures alone say."""
        return self._late[route].value_s(time.monotonic()) if route in self._late else 0.0

    def looked_up(self, prompt_tokens: int, main_hit: int, computed_tokens: int | None) -> None:
        """What a prompt's beginning found at main and at prefill; ``computed_tokens`` None: prefill was not asked."""
        tokens = prompt_tokens - 1
        prefill_hit = None if computed_tokens is None else max(0, tokens - computed_tokens)
        self.hits.observe(time.monotonic(), tokens, prefill_hit, main_hit)
        if computed_tokens is not None:
            self.computed.observe(min(computed_tokens, tokens - main_hit), tokens - main_hit)
