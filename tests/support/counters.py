"""Values of a coordinator's metrics, by the name that a scrape shows."""

from __future__ import annotations

from pdd.serving.coordinator import Coordinator


def counted(coordinator: Coordinator, name: str, **labels: str) -> float:
    """0 for a series that does not exist yet."""
    return coordinator.metrics.registry.get_sample_value(name, labels) or 0.0
