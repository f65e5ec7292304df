"""Real deployments for system tests: three worker processes, the emulated link and the coordinator, over a tiny model or the real one."""

from __future__ import annotations

import time

import grpc

from pdd.config import LaunchConfig
from pdd.launch.local import Deployment
from pdd.tls_setup import coordinator_rpc_tls
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc
from pddbridge.tls import identity
from tests.support.ledger import IDLE_WITHIN_S, busy


def launch_config(
    model: str,
    *,
    engines: tuple[str, str, str] = ("jax", "jax", "torch"),
    kv_dtype: str = "float32",
    max_context: int = 512,
    num_pages: int = 64,
    rate_mbit_s: float = 200.0,
    rtt_ms: float = 4.0,
    max_rows: int = 8,
    max_step_tokens: int = 64,
    policy: dict[str, object] | None = None,
    main_max_context: int | None = None,
    survival: dict[str, object] | None = None,
    mains: int = 1,
) -> LaunchConfig:
    """Prefill and relay at site a, main at site b. JAX has pages of 32, PyTorch of 16, whichever side they are on.

    A catch-up chunk of 5 tokens makes catch-up handoffs take several rounds within short answers.
    """

    def worker(name: str, role: str, site: str, engine: str, context: int) -> dict[str, object]:
        page = 32 if engine == "jax" else 16
        pages = num_pages * 32 // page
        sizes = {
            "page_size": page,
            "num_pages": pages,
            "max_context_tokens": context,
            "max_rows": max_rows,
            "max_step_tokens": max_step_tokens,
        }
        return {"name": name, "role": role, "site": site, "engine": engine, "threads": 1, **sizes}

    return LaunchConfig.model_validate(
        {
            "model": model,
            "kv_dtype": kv_dtype,
            "sites": ["a", "b"],
            "links": [{"between": ["a", "b"], "emulate": {"rate_mbit_s": rate_mbit_s, "rtt_ms": rtt_ms, "jitter_ms": 1.0}}],
            "workers": [
                worker("prefill-0", "prefill", "a", engines[0], max_context),
                worker("relay-0", "relay", "a", engines[1], max_context),
                *(worker(f"main-{i}", "main", "b", engines[2], main_max_context or max_context) for i in range(mains)),
            ],
            "serving": {"site": "a", "allow_override": True},
            "policy": {"pipeline": "relay", "catch_up_chunk": 5, **(policy or {})},
            "survival": survival or {},
        }
    )


def ledger(deployment: Deployment, worker: str) -> worker_pb2.LedgerReply:
    """One worker's ledger, asked for directly (not over the emulated link)."""
    with worker_channel(deployment, worker) as channel:
        return worker_pb2_grpc.WorkerStub(channel).Ledger(worker_pb2.LedgerRequest(), timeout=10)


def worker_channel(deployment: Deployment, worker: str) -> grpc.Channel:
    """To its control port, as the coordinator is let in."""
    place, tls = deployment.topology.worker(worker), coordinator_rpc_tls(deployment.config)
    if tls is None:
        return grpc.insecure_channel(str(place.control))
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return grpc.secure_channel(str(place.control), credentials, [("grpc.ssl_target_name_override", identity(place.name, place.role))])


def ledgers(deployment: Deployment) -> dict[str, worker_pb2.LedgerReply]:
    return {place.name: ledger(deployment, place.name) for place in deployment.topology.workers}


def assert_idle(deployment: Deployment, within_s: float = IDLE_WITHIN_S) -> None:
    """Within ``within_s`` every worker holds no request, no transfer and no pinned page, and its pages add up."""
    deadline_s = time.monotonic() + within_s
    while True:
        held = {name: found for name, reply in ledgers(deployment).items() if (found := busy(reply)) is not None}
        if not held:
            return
        assert time.monotonic() < deadline_s, f"after {within_s} s still held: {held}"
        time.sleep(0.02)


def worker_address(deployment: Deployment, name: str) -> str:
    return str(deployment.topology.worker(name).control)
