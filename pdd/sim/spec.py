"""What is simulated: workers by role, their costs and sizes, the link, the policy. Plain numbers, from a launch config or a catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdd.policy_config import PolicyConfig
from pdd.sim.costs import EngineCost
from pdd.sim.link import Schedule

# pdd: the policy decides · direct: main alone waits for its KV · relay_to_end: what would be relayed stays on the relay and never reaches
# main, which is the rule that collapses (kept to show that it does)
Rule = Literal["pdd", "direct", "relay_to_end"]


@dataclass(frozen=True)
class RoleSpec:
    """``count`` workers alike, each with ``max_rows`` rows and a prefix cache of ``cache_tokens``. ``threads``: that one uses of a shared
    host, where there is one · ``step_tokens``: new tokens of a step at most, so that a prompt's KV leaves in pieces.
    """

    count: int
    cost: EngineCost
    max_rows: int
    cache_tokens: int
    threads: int = 1
    step_tokens: int = 2048


@dataclass(frozen=True)
class LinkSpec:
    """``flow_bytes_s``: of one transfer at most, None: the whole link · ``rtt_s``: between the sites."""

    rate_bytes_s: float
    rtt_s: float
    flow_bytes_s: float | None = None
    schedule: Schedule = "fair"


@dataclass(frozen=True)
class SystemSpec:
    """``relay`` None: there is none. ``local_bytes_s``: KV from prefill to relay within the site · ``host_cores``: that all workers share;
    None: each has a chip of its own · ``overhead_s``: of a request at the coordinator and doors, before prefill.
    """

    prefill: RoleSpec
    relay: RoleSpec | None
    main: RoleSpec
    link: LinkSpec
    kv_bytes_per_token: float
    local_bytes_s: float
    policy: PolicyConfig
    rule: Rule = "pdd"
    host_cores: float | None = None
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name, role in (("prefill", self.prefill), ("relay", self.relay), ("main", self.main)):
            if role is not None and (role.count < 1 or role.max_rows < 1):
                raise ValueError(f"{name}: given {role.count} workers of {role.max_rows} rows, allowed from 1 on")
        if self.link.rate_bytes_s <= 0 or self.local_bytes_s <= 0 or self.kv_bytes_per_token <= 0:
            raise ValueError(f"rates and sizes: allowed above 0, given {self.link}, {self.local_bytes_s}, {self.kv_bytes_per_token}")
