"""A worker's side of its lease: says to the coordinator that it is there, again well within the lease, and that it leaves.

The coordinator can do without: it asks its workers how they are. What this adds is that a new process is known at once, and that a worker
which is told to stop can say so before it does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from pdd.topology import WorkerPlace
from pddbridge.rpc.gen import registry_pb2, registry_pb2_grpc

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
_RETRY_S = 1.0


class Registrar:
    """``run`` until cancelled; ``close`` at the end. ``place`` and ``fingerprint`` are told to be compared, not to be believed."""

    def __init__(self, channel: grpc.aio.Channel, place: WorkerPlace, epoch: int, fingerprint: str) -> None:
        self._channel = channel
        self._stub = registry_pb2_grpc.RegistryStub(channel)
        self._request = registry_pb2.RegisterRequest(
            name=place.name,
            epoch=epoch,
            role=place.role,
            site=place.site,
            control=str(place.control),
            kv=str(place.kv),
            fingerprint=fingerprint,
        )

    async def run(self, on_draining: Callable[[], None]) -> None:
        """Register and renew. ``on_draining``: the operator wants this worker to leave."""
        refused = ""
        while True:
            try:
                reply = await self._stub.Register(self._request, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                # No coordinator may be there yet, or one that is started again; a refusal is worth a line, once.
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) and refused != error.details():
                    refused = error.details() or error.code().name
                    logger.warning("not registered: %s", refused)
                await asyncio.sleep(_RETRY_S)
                continue
            refused = ""
            if reply.draining:
                on_draining()
            await asyncio.sleep(max(0.05, reply.lease_s / 3))

    async def close(self) -> None:
        """Tell that this process goes. Nobody waits for an answer that does not come."""
        try:
            request = registry_pb2.LeaveRequest(name=self._request.name, epoch=self._request.epoch)
            await self._stub.Leave(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.info("left without a word: %s", error.code().name)
        finally:
            await self._channel.close(grace=None)
