"""The deployments that chaos happens to: how many workers of each role, how much memory they have, how slow the link is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pdd.chaos.model import MAX_CONTEXT
from pdd.config import LaunchConfig, LocalLink

ShapeName = Literal["lean", "tight", "wide"]
Engines = tuple[str, str, str]
# Fast to start. Any others by option: float32 everywhere, so tokens must be equal, whoever makes them.
DEFAULT_ENGINES: Final[Engines] = ("torch", "torch", "torch")
_PAGES: Final = {"torch": 16, "jax": 32}


@dataclass(frozen=True)
class Shape:
    """``num_pools``: how many requests of full length the pages of a worker hold · ``local_link``: what KV takes to the relay."""

    name: ShapeName
    num_prefill: int
    num_relay: int
    num_main: int
    num_pools: float
    rate_mbit_s: float
    local_link: LocalLink
    max_prompt: int = 360
    max_new: int = 240

    @property
    def workers(self) -> tuple[str, ...]:
        counts = (("prefill", self.num_prefill), ("relay", self.num_relay), ("main", self.num_main))
        return tuple(f"{role}-{i}" for role, count in counts for i in range(count))


SHAPES: Final[dict[ShapeName, Shape]] = {
    "lean": Shape("lean", 1, 1, 1, num_pools=8, rate_mbit_s=12.0, local_link="shm"),
    # Little more than one request of full length: pages run out, requests are preempted and refused.
    "tight": Shape("tight", 1, 1, 1, num_pools=1.5, rate_mbit_s=12.0, local_link="auto"),
    "wide": Shape("wide", 2, 2, 2, num_pools=8, rate_mbit_s=24.0, local_link="tcp"),
}


def launch_config(shape: Shape, model: str, engines: Engines = DEFAULT_ENGINES, **policy: object) -> LaunchConfig:
    """Prefill and relay at one site, main and a slow emulated link to it at the other. ``engines``: of prefill, relay, main."""

    def worker(name: str) -> dict[str, object]:
        role = name.split("-")[0]
        engine = engines[("prefill", "relay", "main").index(role)]
        page = _PAGES[engine]
        return {
            "name": name,
            "role": role,
            "site": "far" if role == "main" else "near",
            "engine": engine,
            "page_size": page,
            "num_pages": int(shape.num_pools * -(-MAX_CONTEXT // page)),
            "max_context_tokens": MAX_CONTEXT,
            "max_rows": 8,
            "max_step_tokens": 64,
            "threads": 1,
        }

    link = {"between": ["near", "far"], "emulate": {"rate_mbit_s": shape.rate_mbit_s, "rtt_ms": 10.0, "jitter_ms": 1.0}}
    return LaunchConfig.model_validate(
        {
            "model": model,
            "kv_dtype": "float32",
            "sites": ["near", "far"],
            "links": [link],
            "local_link": shape.local_link,
            "workers": [worker(name) for name in shape.workers],
            "serving": {"site": "near", "allow_override": True, "request_timeout_s": 90.0},
            "policy": {"direct_budget_s": 0.05, "catch_up_chunk": 8, **policy},
        }
    )


def shape_names(given: str) -> Sequence[ShapeName]:
    """Of a list separated by commas. Raises ValueError naming the option."""
    names: list[ShapeName] = [name for name in SHAPES if name in given.split(",")]
    if not names or set(given.split(",")) != set(names):
        raise ValueError(f"--shapes: given {given!r}, allowed some of {','.join(SHAPES)}")
    return names
