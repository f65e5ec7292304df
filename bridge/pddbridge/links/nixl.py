"""KV through NIXL, for processes within a site: one-sided writes over shared memory, TCP or RDMA, whatever the hardware has. An optional
extra. The link's whole interface.
"""

from pddbridge.links.nixl_agent import NixlAgent, NixlError, installed
from pddbridge.links.nixl_sender import NixlSender
from pddbridge.links.nixl_server import NixlServer
from pddbridge.links.slot_peer import SlotSettings

__all__ = ["NixlAgent", "NixlError", "NixlSender", "NixlServer", "SlotSettings", "installed"]
