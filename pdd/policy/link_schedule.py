"""Which transfer sends next on a shared link: the bridge's own choice, so that a simulator decides as sending workers do. Pure."""

from pddbridge.link_schedule import (
    SCHEDULES,
    LinkRules,
    Priority,
    Schedule,
    Turn,
    TurnReason,
    WaitingTransfer,
    choose_transfer,
)

__all__ = ["SCHEDULES", "LinkRules", "Priority", "Schedule", "Turn", "TurnReason", "WaitingTransfer", "choose_transfer"]
