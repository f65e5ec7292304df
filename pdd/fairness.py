"""How much service each tenant has had, so that the least served comes first. Owns the virtual token counters of arXiv:2401.00588.

A tenant that was away starts where the least served of those present stands: being away saves nothing up, and owes nothing either.
"""

from __future__ import annotations

from typing import Final

# An output token costs more than an input token; the paper's weights, which follow what is charged for them.
COMPUTED_WEIGHT: Final = 1
SAMPLED_WEIGHT: Final = 2


def account(namespace: str) -> str:
    """The tenant of a cache's namespace, whatever salt of its own choice follows: salts would otherwise be turns for the asking."""
    return namespace.partition("/")[0]


class TenantService:
    """Counters of the tenants that have requests here, each known by any of its namespaces. Only differences between them mean anything."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._num_requests: dict[str, int] = {}

    def arrive(self, tenant: str) -> None:
        """A request of ``tenant`` has come."""
        tenant = account(tenant)
        if tenant not in self._num_requests:
            floor = min((self._counters[present] for present in self._num_requests), default=0)
            self._counters[tenant] = max(floor, self._counters.get(tenant, floor))
        self._num_requests[tenant] = self._num_requests.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A request of ``tenant`` is gone. Counters that the return of their tenant would lift anyway are forgotten."""
        tenant = account(tenant)
        self._num_requests[tenant] -= 1
        if self._num_requests[tenant]:
            return
        del self._num_requests[tenant]
        if not self._num_requests:
            self._counters.clear()
            return
        floor = min(self._counters[present] for present in self._num_requests)
        self._counters = {t: n for t, n in self._counters.items() if t in self._num_requests or n > floor}

    def serve(self, tenant: str, num_computed: int, num_sampled: int) -> None:
        """``num_computed`` tokens of one of its requests were computed, ``num_sampled`` were sampled."""
        self._counters[account(tenant)] += COMPUTED_WEIGHT * num_computed + SAMPLED_WEIGHT * num_sampled

    def of(self, tenant: str) -> int:
        """The counter of a tenant with requests here."""
        return self._counters[account(tenant)]
