"""KV through shared memory, for two processes of one host: payloads in a shared arena, frame headers and replies on a Unix socket.
The link's whole interface.
"""

from pddbridge.links.shm_io import reachable, supported
from pddbridge.links.shm_sender import ShmSender
from pddbridge.links.shm_server import ShmServer
from pddbridge.links.slot_peer import SlotSettings
from pddbridge.links.slot_server import SlotServerCounters

__all__ = ["ShmSender", "ShmServer", "SlotServerCounters", "SlotSettings", "reachable", "supported"]
