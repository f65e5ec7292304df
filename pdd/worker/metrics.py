"""What the step thread and its engine count, ever. See pdd.v1.LedgerReply for what the names mean to others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Counters:
    """``computed_prompt_tokens``: prompt positions computed here, but for each prompt's last. That one, always the first decode step's
    input, and log positions are ``computed_log_tokens``. Recomputing after a preemption counts again. ``steps_ahead``: steps that were
    started before the tokens of the step before were known · ``rows_void``: rows of those whose request had ended, or that were
    fed a drawn token which was not confirmed.
    """

    steps: int = 0
    computed_prompt_tokens: int = 0
    computed_log_tokens: int = 0
    sampled_tokens: int = 0
    steps_ahead: int = 0
    rows_void: int = 0


@dataclass(frozen=True)
class EngineCounts:
    """``chosen``, ``fallbacks``: as in :class:`pddbridge.engine.EngineStats`, copies that nobody writes to."""

    chosen: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)
