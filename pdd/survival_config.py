"""What the system does about workers that fail, hang, join and leave: every bound of it, in one section of the launch config."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from pdd.security_config import is_loopback
from pdd.strict_model import StrictModel

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Port = Annotated[int, Field(ge=1, le=65535)]


class BreakerSettings(StrictModel):
    """``failures``: in a row, after which a worker gets no request · ``first_s``: for so long at first; each trial that fails multiplies it
    by ``factor``, up to ``longest_s``.
    """

    failures: Annotated[int, Field(ge=1)] = 3
    first_s: Seconds = 1.0
    factor: Annotated[float, Field(ge=1, le=100)] = 2.0
    longest_s: Seconds = 60.0


class RoutingSettings(StrictModel):
    """``affinity_slack``: share of a worker's rows by which the worker that knows a prompt's beginning may be fuller than the emptiest ·
    ``min_prefix_tokens``: known tokens that are worth a detour · ``prefix_chunk_tokens``: granularity of what is remembered ·
    ``max_prefixes``: chunks remembered per coordinator, oldest forgotten first.
    """

    affinity_slack: Annotated[float, Field(ge=0, le=1)] = 0.25
    min_prefix_tokens: Annotated[int, Field(ge=1)] = 64
    prefix_chunk_tokens: Annotated[int, Field(ge=1)] = 32
    max_prefixes: Annotated[int, Field(ge=1)] = 65_536


class RestartSettings(StrictModel):
    """How the launcher treats processes that end or hang. ``most``: restarts of one process within ``window_s``; before the second and
    later ones of a window it waits ``first_s``, doubled each time up to ``longest_s``. ``unresponsive_s``: a worker that was ready and has
    not answered for so long is killed and started again.
    """

    most: Annotated[int, Field(ge=0)] = 5
    window_s: Seconds = 300.0
    first_s: Seconds = 1.0
    longest_s: Seconds = 30.0
    unresponsive_s: Seconds = 30.0


class SurvivalConfig(StrictModel):
    """Times are the monotonic clock's, of the process that waits.

    ``watch_interval_s``: between two questions to a worker how it is · ``answer_timeout_s``: after which an answer is missing, and the
    worker gets no new request · ``lost_after_s``: without any answer for so long, what a worker holds is lost · ``stuck_after_s``: a turn
    of its step thread that takes this long means it hangs, however well its event loop answers · ``silent_after_s``: a request that owes
    tokens and has not sent one for so long is lost on that worker alone · ``exit_after_s``: a worker whose step thread is stuck for so long
    ends itself · ``max_attempts``: workers that one request may be opened on, over its life ·
    ``return_wait_s``: how long a request that nobody is left for waits for a worker to come back.

    ``lease_s``: a registered worker that did not renew for so long is lost · ``drain_timeout_s``: how long requests of a worker that
    drains may go on before they are moved to another.

    ``admin_host``, ``admin_port``: where the launcher takes `pdd workers`, ``registry_port``: where a coordinator takes registrations;
    None: a free port.
    """

    watch_interval_s: Seconds = 1.0
    answer_timeout_s: Seconds = 5.0
    lost_after_s: Seconds = 10.0
    stuck_after_s: Seconds = 20.0
    silent_after_s: Seconds = 60.0
    exit_after_s: Seconds = 120.0
    max_attempts: Annotated[int, Field(ge=2)] = 12
    return_wait_s: Annotated[float, Field(ge=0, le=86_400)] = 10.0
    lease_s: Seconds = 10.0
    drain_timeout_s: Seconds = 60.0
    admin_host: str = "127.0.0.1"
    admin_port: Port | None = None
    registry_port: Port | None = None
    breaker: BreakerSettings = BreakerSettings()
    routing: RoutingSettings = RoutingSettings()
    restarts: RestartSettings = RestartSettings()

    @model_validator(mode="after")
    def _in_order(self) -> SurvivalConfig:
        if self.exit_after_s <= self.stuck_after_s:
            raise ValueError(f"exit_after_s: given {self.exit_after_s:g}, must be above stuck_after_s ({self.stuck_after_s:g})")
        if not is_loopback(self.admin_host):
            raise ValueError(f"admin_host: given {self.admin_host!r}, must be a loopback address: whoever reaches it may start workers")
        return self
