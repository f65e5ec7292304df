"""The three modes that are compared over the same worker processes: same-site split, cross-site split, PDD.

A mode is a coordinator of its own over the shared workers: *same_site* reaches main decode without the emulated link (over TCP, as KV for
another site takes nothing else; on one machine that is gigabytes per second) and goes direct,
*cross_site* reaches it over the link and goes direct, *pdd* reaches it over the link with the config's policy. In every mode the first
token comes from a decode worker.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Literal

from pdd.config import LaunchConfig
from pdd.launch.held_ports import HeldPorts
from pdd.launch.local import Deployment
from pdd.launch.plan import plan_doors
from pdd.launch.serve import StartProgress
from pdd.topology import Route, Topology

Mode = Literal["same_site", "cross_site", "pdd"]
MODES: tuple[Mode, ...] = ("same_site", "cross_site", "pdd")
LABELS = {"same_site": "same-site split", "cross_site": "cross-site split", "pdd": "PDD"}


def start_modes(deployment: Deployment, progress: StartProgress) -> dict[Mode, str]:
    """Start the workers and a coordinator per mode; the URL of each one's completions. Raises StartError."""
    deadline_s = time.monotonic() + deployment.config.start_timeout_s
    urls: dict[Mode, str] = {}
    with progress.bars:
        deployment.start_workers()
        deployment.wait_ready(deadline_s, progress)
        for mode in MODES:
            mode_config, topology = _mode(mode, deployment.config, deployment.topology, deployment.ports)
            deployment.start_coordinator(f"coordinator-{mode.replace('_', '-')}", mode_config, topology)
            urls[mode] = f"http://{topology.http}/v1/completions"
        deployment.wait_ready(deadline_s, progress)
    return urls


def own_ports(config: LaunchConfig) -> LaunchConfig:
    """With doors on free ports: a service that runs on the config's own may go on."""
    return config.model_copy(update={"serving": config.serving.model_copy(update={"http_port": None, "grpc_port": None})})


def _mode(mode: Mode, config: LaunchConfig, workers: Topology, ports: HeldPorts) -> tuple[LaunchConfig, Topology]:
    """The config and topology of a mode's coordinator: same workers, ports of its own."""
    serving = own_ports(config).serving.model_copy(update={"allow_override": True})
    policy = config.policy if mode == "pdd" else config.policy.model_copy(update={"pipeline": "direct"})
    mode_config = config.model_copy(update={"serving": serving, "policy": policy})
    http, grpc = plan_doors(mode_config, ports)
    places = workers.workers
    if mode == "same_site":
        places = tuple(replace(p, routes=tuple(Route(r.from_site, p.control, p.kv) for r in p.routes)) for p in places)
    return mode_config, Topology(places, http, grpc)
