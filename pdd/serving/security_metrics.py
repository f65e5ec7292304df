"""Metrics of who was turned away at the front doors, read where they are counted."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdd.serving.accounts import Accounts
from pdd.serving.http_limits import ConnectionCounts
from pdd.serving.tenant_limits import TenantLimits


class AccountCollector(Collector):
    """Of API keys and tenants' limits."""

    def __init__(self, accounts: Accounts, limits: TenantLimits) -> None:
        self._accounts = accounts
        self._limits = limits

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("pdd_keys_refused", "Calls without a valid API key", value=self._accounts.num_refused)
        yield CounterMetricFamily("pdd_key_files_unreadable", "Changes of the file of keys not taken", value=self._accounts.num_unreadable)
        limited = CounterMetricFamily("pdd_tenant_limited", "Generations refused by a tenant's limit", labels=("tenant", "limit"))
        for (tenant, limit), count in self._limits.num_refused.items():
            limited.add_metric((tenant, limit), count)
        yield limited


class ConnectionCollector(Collector):
    """Of the HTTP door's connections."""

    def __init__(self, counts: ConnectionCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily("pdd_http_connections_refused", "Connections closed by the door's limits", labels=("limit",))
        refused.add_metric(("too_many",), self._counts.refused)
        refused.add_metric(("headers_late",), self._counts.slow)
        yield refused
