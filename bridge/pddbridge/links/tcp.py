"""KV over TCP, for the wide area: frames on raw asyncio sockets, several warm connections per receiver. The link's whole interface."""

from pddbridge.kv_handshake import PROTOCOL_VERSION, Handshake, HandshakeError
from pddbridge.kv_transfer import TransferFailed, TransferReport
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.schedule import Priority
from pddbridge.links.stats import LinkStats, SenderCounters
from pddbridge.links.tcp_connection import Liveness
from pddbridge.links.tcp_peer import SenderSettings
from pddbridge.links.tcp_sender import KVSender
from pddbridge.links.tcp_server import KVServer, ServerCounters

__all__ = [
    "PROTOCOL_VERSION",
    "Handshake",
    "HandshakeError",
    "KVSender",
    "KVServer",
    "LinkStats",
    "Liveness",
    "OutgoingTransfer",
    "Priority",
    "SenderCounters",
    "SenderSettings",
    "ServerCounters",
    "TransferFailed",
    "TransferReport",
]
