"""Threads that compute give way to those that answer peers: a device's work takes longer for it by next to nothing, a peer does not wait.

An event loop needs a core for some tens of microseconds, now; a step needs all it can get, for hundreds of milliseconds. Between equals a
kernel lets the loop wait until somebody's turn is over, and several of them where prefill and decode share cores.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Final

logger = logging.getLogger(__name__)

# Of Linux's nice values, which a thread has of its own and hands on to threads that it starts. A third of an event loop's weight: enough to
# be interrupted by one, and not next to nothing beside other programs that compute all the time.
COMPUTE_NICE: Final = 5


def give_way(by: int = COMPUTE_NICE) -> None:
    """The calling thread, and whatever threads it starts from now on, give way to others, by so much more than before. Where nice is not a
    thread's own, or a sandbox does not let it be set, nothing is changed. Raises ValueError for a negative ``by``.
    """
    if by < 0:
        raise ValueError(f"by: given {by}, allowed 0 or more")
    if sys.platform == "linux":
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + by)
        except OSError as error:
            logger.warning("thread %d does not give way: %s", thread, error)
