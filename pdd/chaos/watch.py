"""What can be asked of a deployment from outside while it is being broken: whether it is ready, and what its ledgers hold."""

from __future__ import annotations

import http.client
import socket
import time
from dataclasses import dataclass

import grpc

from pdd.launch.local import Deployment
from pdd.topology import Address
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc

_POLL_S = 0.02
_ASK_TIMEOUT_S = 5.0


class NotInTimeError(Exception):
    """Something was not as it should be by its deadline; the message says what."""


def wait_ready(address: str, unlike_epoch: int, deadline_s: float) -> int:
    """Until the worker at ``address`` is warmed up and its epoch is not ``unlike_epoch``. Returns the epoch. Raises NotInTimeError."""
    while time.monotonic() < deadline_s:
        with grpc.insecure_channel(address) as channel:
            try:
                info = worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest(), timeout=_ASK_TIMEOUT_S)
            except grpc.RpcError:
                info = worker_pb2.WorkerInfo()
        if info.ready and info.epoch != unlike_epoch:
            return int(info.epoch)
        time.sleep(_POLL_S * 5)
    raise NotInTimeError(f"the worker at {address} is not ready")


def wait_listening(address: Address, deadline_s: float) -> None:
    """Until somebody accepts connections there. Raises NotInTimeError."""
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection((address.host, address.port), timeout=_ASK_TIMEOUT_S).close()
        except OSError:
            time.sleep(_POLL_S)
        else:
            return
    raise NotInTimeError(f"nobody listens at {address}")


def wait_healthy(door: Address, deadline_s: float) -> None:
    """Until the coordinator says that it can use every worker; one that is back is used once it was met again. Raises NotInTimeError."""
    said = "nothing"
    while time.monotonic() < deadline_s:
        connection = http.client.HTTPConnection(door.host, door.port, timeout=_ASK_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            said = response.read().decode("utf-8", "replace")
            if response.status == http.HTTPStatus.OK:
                return
        except (OSError, http.client.HTTPException) as error:
            said = str(error)
        finally:
            connection.close()
        time.sleep(_POLL_S)
    raise NotInTimeError(f"the coordinator is not healthy again, it says: {said}")


def ledger(address: str) -> worker_pb2.LedgerReply:
    """Asked for directly, not over the emulated link. Raises grpc.RpcError."""
    with grpc.insecure_channel(address) as channel:
        return worker_pb2_grpc.WorkerStub(channel).Ledger(worker_pb2.LedgerRequest(), timeout=_ASK_TIMEOUT_S)


def kv_bytes_per_token(address: str) -> int:
    """As stored. Raises grpc.RpcError."""
    with grpc.insecure_channel(address) as channel:
        return int(worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest(), timeout=_ASK_TIMEOUT_S).kv_bytes_per_token)


@dataclass(frozen=True)
class Idle:
    """``after_s`` until nothing was held any more; None when it still was at the end of the wait: ``held`` then says what, and
    ``leaked_pages`` counts pages that no request needs and pages that do not add up.
    """

    after_s: float | None
    leaked_pages: int = 0
    held: str = ""


def wait_idle(deployment: Deployment, within_s: float) -> Idle:
    """Ask every worker until all are idle, at most ``within_s``."""
    begun_s = time.monotonic()
    while True:
        replies: dict[str, worker_pb2.LedgerReply] = {}
        held: dict[str, str] = {}
        for place in deployment.topology.workers:
            try:
                replies[place.name] = ledger(str(place.control))
                if found := _held(replies[place.name]):
                    held[place.name] = found
            except grpc.RpcError:
                held[place.name] = "does not answer"
        now_s = time.monotonic() - begun_s
        if not held:
            return Idle(now_s)
        if now_s > within_s:
            leaked = sum(reply.pinned_pages + abs(_imbalance(reply)) for reply in replies.values())
            return Idle(None, leaked, "; ".join(f"{name}: {what}" for name, what in held.items()))
        time.sleep(_POLL_S)


def _imbalance(reply: worker_pb2.LedgerReply) -> int:
    return int(reply.total_pages) - int(reply.free_pages) - int(reply.cached_pages) - int(reply.pinned_pages)


def _held(reply: worker_pb2.LedgerReply) -> str:
    counts = {
        "pinned pages": reply.pinned_pages,
        "requests": reply.num_requests,
        "incoming transfers": reply.num_incoming_transfers,
        "outgoing transfers": reply.num_outgoing_transfers,
        "pages that do not add up": abs(_imbalance(reply)),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
