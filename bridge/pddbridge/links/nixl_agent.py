"""NIXL's agent of one process, in a thread of its own that does all its calls and polls for it: NIXL has no awaitable and no descriptor.

The thread polls only while a write of ours is under way or a peer has said that writes to us are: the target has to make progress too, or
writes over TCP stall. Otherwise it sleeps. NIXL notices no peer that stopped, so writes have a deadline here. Memory that a stuck write may
still reach is quarantined: never freed, never used again, and bounded in number.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from nixl_cu13._api import nixl_agent, nixl_xfer_handle

log = logging.getLogger(__name__)

_MODULE: Final = "nixl_cu13"
_POLL_S: Final = 50e-6
# One frame of 8 MiB within a site: thousands of times what it takes.
_WRITE_TIMEOUT_S: Final = 5.0
_MAX_QUARANTINED: Final = 8
TAG_BYTES: Final = 8

T = TypeVar("T")


class NixlError(OSError):
    """What NIXL could not do."""


def installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec(_MODULE) is not None


class WriteEnd(Enum):
    """How a write ended. DONE: it is there. FAILED: it is not, and touches memory no more. STUCK: nobody knows; its memory is lost."""

    DONE = "done"
    FAILED = "failed"
    STUCK = "stuck"


@dataclass
class _Write:
    """A posted write and whom to tell when it is over."""

    handle: nixl_xfer_handle
    posted_at: float
    ended: Callable[[WriteEnd], None]


class NixlAgent:
    """``name``: unique among the agents that ever meet. Call ``start`` on the event loop that gets the callbacks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._commands: deque[Callable[[nixl_agent], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._writes: list[_Write] = []
        self._listeners: dict[bytes, Callable[[bytes], None]] = {}
        self._awaited: dict[bytes, int] = {}
        self._quarantine: list[np.ndarray] = []
        self._stuck: list[nixl_xfer_handle] = []
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)

    @property
    def num_quarantined(self) -> int:
        """Pieces of memory that are lost to writes that may still come."""
        return len(self._quarantine)

    async def start(self) -> None:
        """Raises NixlError when NIXL cannot start here."""
        self._loop = asyncio.get_running_loop()
        self._started: Future[None] = Future()
        self._thread.start()
        await asyncio.wrap_future(self._started)

    async def close(self) -> None:
        """Ends the thread. Writes that are under way stay so: their memory is not given back."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    async def call(self, function: Callable[[nixl_agent], T]) -> T:
        """``function(agent)`` in the agent's thread. Raises NixlError for any error of NIXL's."""
        future: Future[T] = Future()

        def run(agent: nixl_agent) -> None:
            try:
                result = function(agent)
            except Exception as error:  # noqa: BLE001  # NIXL's errors have no common base
                future.set_exception(NixlError(f"nixl: {error!r}"))
            else:
                future.set_result(result)

        self._do(run)
        return await asyncio.wrap_future(future)

    async def register(self, num_bytes: int) -> tuple[np.ndarray, object]:
        """Zeroed memory that NIXL may write to and from, and its registration. Raises NixlError."""
        if len(self._quarantine) >= _MAX_QUARANTINED:
            raise NixlError(f"nixl: {len(self._quarantine)} pieces of memory are quarantined after stuck writes, no more is given")
        memory = np.zeros(num_bytes, np.uint8)
        region = [(memory.ctypes.data, memory.nbytes, 0, "")]
        return memory, await self.call(lambda agent: agent.register_memory(region, "DRAM"))

    async def give_back(self, memory: np.ndarray, registration: object, may_be_written: bool) -> None:
        """``memory`` is not needed any more. ``may_be_written``: a write from or to it may be under way."""
        if may_be_written:
            log.error("nixl: %d bytes are quarantined after a stuck write", memory.nbytes)
            self._quarantine.append(memory)
            return
        await self.call(lambda agent: agent.deregister_memory(registration))

    def write(self, source: int, destination: int, num_bytes: int, peer: str, message: bytes, ended: Callable[[WriteEnd], None]) -> None:
        """Copy registered memory at address ``source`` to the ``peer`` agent's ``destination``, then deliver ``message`` there.
        ``ended`` is called on the loop.
        """

        def post(agent: nixl_agent) -> None:
            local = agent.get_xfer_descs([(source, num_bytes, 0)], "DRAM")
            remote = agent.get_xfer_descs([(destination, num_bytes, 0)], "DRAM")
            try:
                handle = agent.initialize_xfer("WRITE", local, remote, peer, message)
                state = agent.transfer(handle)
            except Exception as error:  # noqa: BLE001  # NIXL's errors have no common base
                log.error("nixl: cannot write: %r", error)
                self._tell(ended, WriteEnd.FAILED)
                return
            if state == "ERR":
                log.error("nixl: a write was refused")
                self._tell(ended, WriteEnd.FAILED)
            else:
                self._writes.append(_Write(handle, time.monotonic(), ended))

        self._do(post)

    def listen(self, tag: bytes, take: Callable[[bytes], None]) -> None:
        """``take`` is called on the loop with what follows ``tag`` in messages that start with it."""
        assert len(tag) == TAG_BYTES

        def begin(_: nixl_agent) -> None:
            self._listeners[tag], self._awaited[tag] = take, 0

        self._do(begin)

    def forget(self, tag: bytes) -> None:
        """Messages with ``tag`` are dropped from now on, and not awaited."""

        def end(_: nixl_agent) -> None:
            del self._listeners[tag], self._awaited[tag]

        self._do(end)

    def await_messages(self, tag: bytes, number: int) -> None:
        """``number`` more messages with ``tag`` are to come; the thread polls until they are there."""

        def count(_: nixl_agent) -> None:
            self._awaited[tag] += number

        self._do(count)

    def _do(self, command: Callable[[nixl_agent], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _tell(self, ended: Callable[[WriteEnd], None], end: WriteEnd) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(ended, end)

    # In the thread.

    def _run(self) -> None:
        try:
            api = importlib.import_module(f"{_MODULE}._api")
            logging.getLogger("nixl").setLevel(logging.WARNING)
            agent: nixl_agent = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False))
        except Exception as error:  # noqa: BLE001  # NIXL's errors have no common base
            self._started.set_exception(NixlError(f"nixl: cannot start: {error!r}"))
            return
        self._started.set_result(None)
        while not self._stopping:
            if self._commands:
                self._commands.popleft()(agent)
                continue
            if not (self._writes or any(number > 0 for number in self._awaited.values())):
                self._wake.wait()
                self._wake.clear()
                continue
            if not (self._check_writes(agent) or self._take_messages(agent)):
                time.sleep(_POLL_S)

    def _check_writes(self, agent: nixl_agent) -> bool:
        """Whether some write ended."""
        before, now = self._writes, time.monotonic()
        self._writes = []
        for write in before:
            try:
                state = agent.check_xfer_state(write.handle)
            except Exception as error:  # noqa: BLE001  # NIXL's errors have no common base
                state = repr(error)
            if state == "DONE":
                agent.release_xfer_handle(write.handle)
                self._tell(write.ended, WriteEnd.DONE)
            elif state != "PROC":
                log.error("nixl: a write failed: %s", state)
                self._stuck.append(write.handle)
                self._tell(write.ended, WriteEnd.FAILED)
            elif now - write.posted_at > _WRITE_TIMEOUT_S:
                log.error("nixl: a write took longer than %.0f s", _WRITE_TIMEOUT_S)
                self._stuck.append(write.handle)
                self._tell(write.ended, WriteEnd.STUCK)
            else:
                self._writes.append(write)
        return len(self._writes) < len(before)

    def _take_messages(self, agent: nixl_agent) -> bool:
        """Whether some came."""
        try:
            taken = [message for messages in agent.get_new_notifs().values() for message in messages]
        except Exception:  # NIXL's errors have no common base
            log.exception("nixl: cannot take messages")
            return False
        for message in taken:
            tag = message[:TAG_BYTES]
            if take := self._listeners.get(tag):
                self._awaited[tag] -= 1
                if not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(take, message[TAG_BYTES:])
        return bool(taken)
