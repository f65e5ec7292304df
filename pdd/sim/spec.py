"""What is simulated: workers by role, their costs and sizes, the link, the policy. Plain numbers, from a launch config or a catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pdd.policy_config import PolicyConfig
from pdd.sim.costs import EngineCost

Schedule = Literal["fair", "shortest"]
# pdd: the policy decides · direct: main alone waits for its KV · relay_to_end: what would be relayed stays on the relay and never reaches
# main, which is the rule that collapses (kept to show that it does)
Rule = Literal["pdd", "direct", "relay_to_end"]


@dataclass(frozen=True)
class RoleSpec:
    """``count`` workers alike, each with ``max_rows`` rows and a prefix cache of ``cache_tokens``. ``step_tokens``: new tokens of a step
    at most, so that a prompt's KV leaves in pieces.
    """

    count: int
    cost: EngineCost
    max_rows: int
    cache_tokens: int
    step_tokens: int = 2048


@dataclass(frozen=True)
class LinkSpec:
    """``flow_bytes_s``: of one transfer at most, None: the whole link · ``rtt_s``: between the sites · ``coded_share``: of KV as stored
    that crosses, once coded.
    """

    rate_bytes_s: float
    rtt_s: float
    flow_bytes_s: float | None = None
    schedule: Schedule = "fair"
    coded_share: float = 1.0


@dataclass(frozen=True)
class HostSpec:
    """One machine that all workers share. ``slowdown``: the roles whose engines are busy -> how many times longer than alone each of them
    takes · ``beside``: a transfer over the "link", a "push" of prefill's KV to a relay, rows of main whose tokens cross the link
    ("far") -> how many times longer each role takes meanwhile.
    """

    slowdown: Mapping[frozenset[str], Mapping[str, float]]
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Overheads:
    """What a request takes beside its steps, round trips and bytes, seconds. ``main_s``, ``relay_s``: until its first token is at the
    client, by the worker that makes it · ``link_s``: of a transfer over the link, ``link_busy_s``: to a main that decodes · ``hit_s``: of
    prefill, for a prompt that caches know in part. In steps of a decode worker that is busy, which takes commands between them:
    ``reserve_steps`` until it has said what it holds, ``arrive_steps`` from the arrival of KV to the first token.
    """

    main_s: float = 0.0
    relay_s: float = 0.0
    link_s: float = 0.0
    link_busy_s: float = 0.0
    hit_s: float = 0.0
    reserve_steps: float = 1.5
    arrive_steps: float = 2.5


@dataclass(frozen=True)
class Jitter:
    """By how much the time of a prefill step varies: ``sigma`` of its logarithm, normal around what it costs · ``seed``: of the draws."""

    sigma: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class SystemSpec:
    """``relay`` None: there is none. ``local_bytes_s``: KV from prefill to relay within the site · ``host`` None: each worker has chips of
    its own.
    """

    prefill: RoleSpec
    relay: RoleSpec | None
    main: RoleSpec
    link: LinkSpec
    kv_bytes_per_token: float
    local_bytes_s: float
    policy: PolicyConfig
    rule: Rule = "pdd"
    host: HostSpec | None = None
    overheads: Overheads = Overheads()
    jitter: Jitter = Jitter()

    def __post_init__(self) -> None:
        for name, role in (("prefill", self.prefill), ("relay", self.relay), ("main", self.main)):
            if role is not None and (role.count < 1 or role.max_rows < 1):
                raise ValueError(f"{name}: given {role.count} workers of {role.max_rows} rows, allowed from 1 on")
        if self.link.rate_bytes_s <= 0 or self.local_bytes_s <= 0 or self.kv_bytes_per_token <= 0:
            raise ValueError(f"rates and sizes: allowed above 0, given {self.link}, {self.local_bytes_s}, {self.kv_bytes_per_token}")


Mode = Literal["same_site", "cross_site", "pdd"]


def modes(spec: SystemSpec) -> dict[Mode, SystemSpec]:
    """The three that are compared: main reached within one site and without relay, over the link without relay, and as ``spec`` says."""
    at_home = replace(spec.overheads, link_s=0.0, link_busy_s=0.0)
    near = replace(spec.link, rate_bytes_s=spec.local_bytes_s, rtt_s=0.0, flow_bytes_s=None, coded_share=1.0)
    return {
        "same_site": replace(spec, rule="direct", relay=None, link=near, overheads=at_home),
        "cross_site": replace(spec, rule="direct", relay=None),
        "pdd": spec,
    }


def at_rate(spec: SystemSpec, rate_bytes_s: float) -> SystemSpec:
    """Over a link of another rate. What a transfer takes of a host that all share goes by its bytes, so a faster link takes more of it
    while it is busy, and is busy for less long.
    """
    link = replace(spec.link, rate_bytes_s=rate_bytes_s)
    if spec.host is None or "link" not in spec.host.beside:
        return replace(spec, link=link)
    faster = rate_bytes_s / spec.link.rate_bytes_s
    beside = {role: 1.0 + (times - 1.0) * faster for role, times in spec.host.beside["link"].items()}
    return replace(spec, link=link, host=replace(spec.host, beside={**spec.host.beside, "link": beside}))
