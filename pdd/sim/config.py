"""The YAML that `pdd sim` reads: workers by chip and model of the catalogue, or by costs of their own. Owns its validation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from pdd.plan.catalogue import chip, model
from pdd.plan.roofline import Efficiency, engine_cost, kv_tokens
from pdd.policy_config import PolicyConfig
from pdd.roles import Role
from pdd.sim.costs import REQUIRED_COSTS, EngineCost
from pdd.sim.spec import HostSpec, Jitter, LinkSpec, Overheads, RoleSpec, Rule, SystemSpec
from pdd.strict_model import StrictModel
from pdd.user_yaml import mistakes, read_yaml

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class SimRole(StrictModel):
    """``chip`` and ``num_chips`` of each worker, with the config's model; or ``cost``, seconds as :class:`pdd.sim.costs.EngineCost` has
    them, and ``prefill_steps`` (tokens: seconds). ``cache_tokens``: None: what fits beside the weights.
    """

    count: Count
    chip: str | None = None
    num_chips: Count = 1
    cost: dict[str, float] | None = None
    prefill_steps: dict[Count, Positive] = Field(default_factory=dict)
    max_rows: Count = 64
    cache_tokens: Count | None = None
    step_tokens: Count = 8192

    @model_validator(mode="after")
    def _one_of_two(self) -> SimRole:
        if (self.chip is None) == (self.cost is None):
            raise ValueError("either chip or cost must be given")
        if self.prefill_steps and (self.cost is None or len(self.prefill_steps) < 2):
            raise ValueError("prefill_steps: allowed beside cost, for two sizes at least")
        if self.cost is not None:
            if set(self.cost) != set(REQUIRED_COSTS):
                raise ValueError(f"cost: given {sorted(self.cost)}, needed {sorted(REQUIRED_COSTS)}")
            if self.cache_tokens is None:
                raise ValueError("cache_tokens: needed with cost")
        return self


class SimLink(StrictModel):
    """``flow_gbit_s``: that one transfer gets at most (loss, round trip, connections) · ``coded_share``: of KV as stored that crosses."""

    rate_gbit_s: Positive
    rtt_ms: Annotated[float, Field(ge=0)]
    flow_gbit_s: Positive | None = None
    schedule: Literal["fair", "shortest"] = "shortest"
    coded_share: Share = 1.0


class SimBusy(StrictModel):
    """``busy``: roles whose engines run at once · ``times``: how many times longer than alone each of them takes."""

    busy: Annotated[tuple[Role, ...], Field(min_length=1)]
    times: dict[Role, Annotated[float, Field(ge=0.1)]]


class SimHost(StrictModel):
    """See :class:`pdd.sim.spec.HostSpec`."""

    slowdown: tuple[SimBusy, ...]
    beside: dict[Literal["link", "push", "far"], dict[Role, Annotated[float, Field(ge=0.1)]]] = Field(default_factory=dict)

    def spec(self) -> HostSpec:
        slowdown = {frozenset[str](one.busy): {str(role): times for role, times in one.times.items()} for one in self.slowdown}
        return HostSpec(slowdown, {name: {str(role): one for role, one in times.items()} for name, times in self.beside.items()})


class SimOverheads(StrictModel):
    """See :class:`pdd.sim.spec.Overheads`."""

    main_s: Annotated[float, Field(ge=0)] = 0.0
    relay_s: Annotated[float, Field(ge=0)] = 0.0
    link_s: Annotated[float, Field(ge=0)] = 0.0
    link_busy_s: Annotated[float, Field(ge=0)] = 0.0
    hit_s: Annotated[float, Field(ge=0)] = 0.0
    reserve_steps: Annotated[float, Field(ge=0)] = Overheads.reserve_steps
    arrive_steps: Annotated[float, Field(ge=1)] = Overheads.arrive_steps


class SimEfficiency(StrictModel):
    """See :class:`pdd.plan.roofline.Efficiency`."""

    prefill_flops: Share = Efficiency.prefill_flops
    decode_flops: Share = Efficiency.decode_flops
    memory: Share = Efficiency.memory
    step_s: Annotated[float, Field(ge=0)] = Efficiency.step_s
    spare_memory: Annotated[float, Field(ge=0, lt=1)] = Efficiency.spare_memory


class SimConfig(StrictModel):
    """``local_gbit_s``: from prefill to relay within the site. Everything else as :class:`pdd.sim.spec.SystemSpec` says."""

    model: str | None = None
    kv_bytes_per_token: Positive | None = None
    prefill: SimRole
    relay: SimRole | None = None
    main: SimRole
    link: SimLink
    local_gbit_s: Positive = 200.0
    policy: PolicyConfig = PolicyConfig()
    rule: Rule = "pdd"
    host: SimHost | None = None
    overheads: SimOverheads = SimOverheads()
    jitter: Annotated[float, Field(ge=0)] = 0.0
    efficiency: SimEfficiency = SimEfficiency()

    @model_validator(mode="after")
    def _complete(self) -> SimConfig:
        roles = [role for role in (self.prefill, self.relay, self.main) if role is not None]
        if self.model is None and any(role.chip is not None for role in roles):
            raise ValueError("model: needed for workers that are given by their chip")
        if self.model is None and self.kv_bytes_per_token is None:
            raise ValueError("kv_bytes_per_token: needed without a model of the catalogue")
        return self

    def spec(self) -> SystemSpec:
        """Raises ValueError for a chip or model that is not in the catalogue, and for a model that does not fit."""
        kv_bytes = self.kv_bytes_per_token if self.kv_bytes_per_token is not None else model(self.model or "").kv_bytes_per_token
        flow = None if self.link.flow_gbit_s is None else self.link.flow_gbit_s * 1e9 / 8
        return SystemSpec(
            prefill=self._role("prefill", self.prefill),
            relay=None if self.relay is None else self._role("relay", self.relay),
            main=self._role("main", self.main),
            link=LinkSpec(self.link.rate_gbit_s * 1e9 / 8, self.link.rtt_ms / 1e3, flow, self.link.schedule, self.link.coded_share),
            kv_bytes_per_token=kv_bytes,
            local_bytes_s=self.local_gbit_s * 1e9 / 8,
            policy=self.policy,
            rule=self.rule,
            host=None if self.host is None else self.host.spec(),
            overheads=Overheads(**self.overheads.model_dump()),
            jitter=Jitter(self.jitter),
        )

    def _role(self, name: str, role: SimRole) -> RoleSpec:
        if role.cost is not None:
            assert role.cache_tokens is not None
            steps = tuple(sorted(role.prefill_steps.items()))
            return RoleSpec(role.count, EngineCost(**role.cost, prefill_steps=steps), role.max_rows, role.cache_tokens, role.step_tokens)
        assert role.chip is not None
        assert self.model is not None
        efficiency = Efficiency(**self.efficiency.model_dump())
        of, what = chip(role.chip), model(self.model)
        room = kv_tokens(of, role.num_chips, what, efficiency)
        if room == 0:
            raise ValueError(f"{name}: {self.model} does not fit the memory of {role.num_chips} x {role.chip}")
        cost = engine_cost(of, role.num_chips, what, efficiency)
        return RoleSpec(role.count, cost, role.max_rows, role.cache_tokens or room, role.step_tokens)


def load_sim_config(path: Path) -> SimConfig:
    """Raises ValueError, one line per mistake."""
    try:
        return SimConfig.model_validate(read_yaml("config", path))
    except ValidationError as error:
        raise ValueError("\n".join(f"config {path}: {line}" for line in mistakes(error))) from error
