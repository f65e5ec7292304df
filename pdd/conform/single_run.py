"""One request on one running worker alone: it prefills, decodes and stops by the shared stop rule. The yardstick of stream equality."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from pddbridge import stops
from pddbridge.rpc.convert import params_to_proto
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc
from pddbridge.sampling_params import SamplingParams

_TIMEOUT_S = 120.0


async def single_engine_run(address: str, prompt_ids: Sequence[int], params: SamplingParams, tenant: str = "single") -> list[int]:
    """Its tokens. ``address``: host:port of the worker's gRPC. Raises RuntimeError when the worker fails the request."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Attach()
        await call.write(
            worker_pb2.WorkerCommand(
                open=worker_pb2.Open(
                    request_id=f"single-{time.monotonic_ns()}-{id(call)}",
                    tenant=tenant,
                    prompt_ids=prompt_ids,
                    sampling=params_to_proto(params),
                    kv_source=worker_pb2.KV_SOURCE_COMPUTE,
                    decode=True,
                    timeout_s=_TIMEOUT_S,
                )
            )
        )
        log: list[int] = []
        async for event in call:
            if event.WhichOneof("event") == "failed":
                raise RuntimeError(f"worker at {address}: {event.failed.message}")
            log.extend(record.token_id for record in event.tokens.records)
            if stops.finish_reason(params, log) is not None:
                call.cancel()
                return log
    raise RuntimeError(f"worker at {address} ended its stream after {len(log)} tokens")


def single_engine_runs(address: str, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[list[int]]:
    """Several, one after another: nothing else is in the batch."""

    async def run() -> list[list[int]]:
        return [await single_engine_run(address, prompt, params) for prompt, params in requests]

    return asyncio.run(run())
