"""The launch config: one file names both sites, both engines, the links between and the policy. Owns validation; reads no environment.

``load`` raises ``ValueError`` with one line per mistake, each naming the field, the value given and what is allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from pdd.faults import Fault, RandomFaults
from pdd.flow_config import FlowConfig
from pdd.policy.link_schedule import Schedule
from pdd.policy_config import PolicyConfig
from pdd.roles import Role
from pdd.security_config import SecurityConfig
from pdd.strict_model import StrictModel
from pdd.survival_config import SurvivalConfig
from pdd.user_yaml import mistakes, read_yaml

# How KV moves between two workers of one site. "auto": NIXL if both have it, else shared memory if they are on
# one host, else TCP.
LocalLink = Literal["auto", "tcp", "shm", "nixl"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


def _as_written(value: object) -> object:
    """YAML 1.1 reads a bare ``on`` or ``off`` as a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _core_numbers(value: object) -> object:
    """In one line whatever is wrong, for people who write YAML."""
    given = list(value) if isinstance(value, list | tuple) else []
    if value is None or (given and all(type(one) is int and one >= 0 for one in given) and len(set(given)) == len(given)):
        return value
    raise ValueError(f"given {value!r}, allowed a list of different cores' numbers from 0, as in [0, 1]")


Wish = Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_written)]
Port = Annotated[int, Field(ge=1, le=65535)]


class EmulatedLink(StrictModel):
    """What the emulator does to each direction of a link, and what goes wrong on it."""

    rate_mbit_s: Annotated[float, Field(ge=0.001, le=1e6)]
    rtt_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    jitter_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    faults: tuple[Fault, ...] = ()
    random_faults: RandomFaults | None = None


class LinkConfig(StrictModel):
    """A link between two sites. Without ``emulate`` the sites are reached directly. ``codec`` of KV on it: "auto" is whichever moves most,
    by what was measured of link and codecs; lossy ones (int8, fp8) change results a little and need ``allow_lossy``. ``schedule``: who
    sends next of the transfers that share it, within their class; every ``aged_turn``-th frame is for whoever waited longest. A background
    transfer, which goes when nothing else wants the link, counts as waiting once it had no frame for ``background_after_s``.
    """

    between: tuple[Name, Name]
    emulate: EmulatedLink | None = None
    codec: Literal["auto", "raw", "zstd", "int8", "fp8"] = "auto"
    allow_lossy: bool = False
    schedule: Schedule = "shortest"
    aged_turn: Annotated[int, Field(ge=2)] = 8
    background_after_s: Annotated[float, Field(gt=0, lt=30)] = 10.0

    @model_validator(mode="after")
    def _lossy_is_meant(self) -> LinkConfig:
        if self.codec in ("int8", "fp8") and not self.allow_lossy:
            raise ValueError(f"codec: {self.codec!r} is lossy, which needs allow_lossy: true")
        return self


class WorkerConfig(StrictModel):
    """One worker process. ``port`` and ``kv_port`` may be left out: the launcher then picks free ones. ``model``: where this worker finds
    the model, if not where the config says (GGUF at one site, safetensors at the other); the handshake refuses a different one.
    ``num_devices``: over how many of ``device`` a JAX engine splits the model.
    ``max_decode_wait_chunks``: steps with a prefill chunk that a decode row is left out of at most, where there are more rows than
    ``max_rows``. ``idle_threads``: "spin" for a worker with as many cores of its own as ``threads``, "sleep" where workers share cores
    (PyTorch on a CPU). ``nice``: how far its compute threads stand back behind those of other workers on the same cores, as in nice(2).
    ``cpus``: the host's cores that they run on, by number; all by default.
    ``host_cache_mib``: of host memory for cached pages that must leave the device; 0: they vanish. ``run_ahead``:
    whether a decode step is started before the tokens of the one before are known; "auto": where the device is not the host's CPU.
    ``sample_on_device``: whether tokens are drawn there; "auto" likewise, since a CPU draws faster by the host's sampler. The tokens are
    the same. ``decode_graphs``: whether PyTorch records its decode steps on a CUDA device and replays them; "auto": where it can.
    """

    name: Name
    role: Role
    site: Name
    engine: Literal["jax", "torch"]
    model: str | None = None
    device: str = "cpu"
    compute_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    page_size: Annotated[int, Field(ge=1, le=1024)]
    num_pages: Annotated[int, Field(ge=2)]
    max_context_tokens: Annotated[int, Field(ge=2)]
    max_step_tokens: Annotated[int, Field(ge=1)] = 256
    max_rows: Annotated[int, Field(ge=1)] = 8
    max_decode_wait_chunks: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    idle_threads: Literal["sleep", "spin"] = "sleep"
    nice: Annotated[int, Field(ge=0, le=19)] = 0
    cpus: Annotated[tuple[int, ...] | None, BeforeValidator(_core_numbers)] = None
    num_devices: Annotated[int, Field(ge=1, le=256)] = 1
    run_ahead: Wish = "auto"
    sample_on_device: Wish = "auto"
    decode_graphs: Wish = "auto"
    prefix_cache: bool = True
    host_cache_mib: Annotated[int, Field(ge=0)] = 0
    host: str = "127.0.0.1"
    port: Port | None = None
    kv_port: Port | None = None

    @model_validator(mode="after")
    def _tiers_go_together(self) -> WorkerConfig:
        if self.host_cache_mib and not self.prefix_cache:
            raise ValueError(f"host_cache_mib: given {self.host_cache_mib}, which needs prefix_cache: true")
        return self

    @property
    def can_replay(self) -> bool:
        """Whether the engine has graphs of its steps on the device."""
        return self.engine == "torch" and self.device.startswith("cuda")

    @model_validator(mode="after")
    def _graphs_are_for_devices_that_replay(self) -> WorkerConfig:
        if self.decode_graphs == "on" and not self.can_replay:
            raise ValueError(f"decode_graphs: given 'on' for {self.engine} on device {self.device!r}, allowed with torch on 'cuda'")
        return self

    @model_validator(mode="after")
    def _pool_holds_one_request(self) -> WorkerConfig:
        if self.num_pages * self.page_size < self.max_context_tokens:
            raise ValueError(
                f"num_pages x page_size = {self.num_pages * self.page_size} tokens cannot hold one request of"
                f" max_context_tokens={self.max_context_tokens}"
            )
        return self


class ServingConfig(StrictModel):
    """``allow_override``: clients may force pipeline and handoff per request (benchmarks, tests, proofs)."""

    host: str = "127.0.0.1"
    http_port: Port | None = None
    grpc_port: Port | None = None
    site: Name
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    max_queued_requests: Annotated[int, Field(ge=1)] = 256
    request_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    default_max_tokens: Annotated[int, Field(ge=1)] = 256
    allow_override: bool = False


class LaunchConfig(StrictModel):
    """``model``: a name that ``pdd pull`` fetched, or a local directory. ``kv_dtype`` is one for all workers, or no KV can move.
    ``local_link``: what KV takes between workers of one site; between sites it takes TCP.
    """

    model: str
    kv_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    sites: Annotated[tuple[Name, ...], Field(min_length=1)]
    links: tuple[LinkConfig, ...] = ()
    local_link: LocalLink = "auto"
    workers: Annotated[tuple[WorkerConfig, ...], Field(min_length=1)]
    serving: ServingConfig
    policy: PolicyConfig = PolicyConfig()
    security: SecurityConfig = SecurityConfig()
    survival: SurvivalConfig = SurvivalConfig()
    flow: FlowConfig = FlowConfig()
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0

    @model_validator(mode="after")
    def _names_fit(self) -> LaunchConfig:
        names = [worker.name for worker in self.workers]
        for name in sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"workers: name {name!r} given twice")
        if len(set(self.sites)) != len(self.sites):
            raise ValueError(f"sites: a name is given twice: {list(self.sites)}")
        pairs = [frozenset(link.between) for link in self.links]
        if any(len(pair) != 2 or pairs.count(pair) > 1 for pair in pairs):
            raise ValueError(f"links.between: two different sites, each pair once; given {[list(link.between) for link in self.links]}")
        if self.serving.http_port is not None and self.serving.http_port == self.serving.grpc_port:
            raise ValueError(f"serving.grpc_port: given {self.serving.grpc_port}, which is http_port too")
        for role in ("prefill", "main"):
            if not any(worker.role == role for worker in self.workers):
                raise ValueError(f"workers: none has role {role!r}")
        if self.policy.pipeline in ("relay", "local") and not any(worker.role == "relay" for worker in self.workers):
            raise ValueError(f"policy.pipeline: {self.policy.pipeline!r} given, but no worker has role 'relay'")
        for where, site in [(f"workers.{w.name}.site", w.site) for w in self.workers] + [("serving.site", self.serving.site)]:
            if site not in self.sites:
                raise ValueError(f"{where}: given {site!r}, allowed {list(self.sites)}")
        for link in self.links:
            for site in link.between:
                if site not in self.sites:
                    raise ValueError(f"links.between: given {site!r}, allowed {list(self.sites)}")
        return self

    @model_validator(mode="after")
    def _nothing_in_the_open(self) -> LaunchConfig:
        self.security.check_hosts([(f"workers.{w.name}.host", w.host) for w in self.workers], self.serving.host)
        if self.local_link == "nixl" and not self.security.allows_nixl():
            raise ValueError("local_link: 'nixl' given, which is not encrypted: with security.worker_tls it needs allow_plaintext: true")
        return self

    def link(self, site: str, other: str) -> LinkConfig | None:
        """The declared link between two sites, in either order; None for a site and itself or when nothing is declared."""
        return next((link for link in self.links if site != other and {site, other} == set(link.between)), None)


def load(path: Path) -> LaunchConfig:
    """Read and validate a launch config."""
    raw = read_yaml("config", path)
    if not isinstance(raw, dict):
        raise ValueError(f"config {path}: a mapping is expected, given {type(raw).__name__}")
    try:
        return LaunchConfig.model_validate(raw)
    except ValidationError as error:
        raise ValueError("\n".join(f"config {path}: {line}" for line in mistakes(error))) from error
