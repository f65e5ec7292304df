"""What the plans of all measurements check of themselves."""

from __future__ import annotations

from collections.abc import Mapping


def check_least(plan: object, least: Mapping[str, int]) -> None:
    """``least``: allowed value by field of ``plan``. Raises ValueError naming the first field that is below."""
    for name, value in least.items():
        given = getattr(plan, name)
        if given < value:
            raise ValueError(f"{name}: given {given}, allowed {value} or more")
