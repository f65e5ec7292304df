"""The step thread: builds the engine, owns it alone, alternates between commands and steps. Owns both queues to and from the event loop.

Nothing on the event loop ever waits for a device: commands are dropped into an inbox, events come back through ``call_soon_threadsafe``.
Without work the thread sleeps on a condition until a command comes or a deadline passes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from pdd.worker import messages as m
from pdd.worker.executor import Executor, ExecutorLimits
from pdd.worker.metrics import EngineCounts
from pddbridge.engine import Engine, EngineConfig
from pddbridge.give_way import give_way
from pddbridge.kv_layout import KVLayout
from pddbridge.kv_spec import KVSpec
from pddbridge.model_spec import ModelSpec

logger = logging.getLogger(__name__)

# Received KV is placed between steps; more than this in one go would show as a pause in the neighbours' tokens.
PLACE_BYTES_PER_STEP = 16 * 1024 * 1024

# How old what it tells of the engine's counts may be while it steps.
COUNTS_EVERY_S = 0.5

THREAD_NAME = "step-loop"

Events = list[tuple[str, m.Event]]


@dataclass(frozen=True)
class EngineFacts:
    """What the rest of the worker needs to know of the engine, read once after warm-up: only the step thread touches the engine itself."""

    engine: str
    config: EngineConfig
    spec: ModelSpec
    kv_spec: KVSpec
    layout: KVLayout
    weights_digest: str


class StepLoopEndedError(Exception):
    """Nobody serves commands any more."""


class StepLoop:
    """``deliver(events)`` and ``crashed(error)`` are called on ``loop``.

    ``ready`` resolves once the engine is warm, or fails with the engine's error.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[Events], None],
        crashed: Callable[[BaseException], None],
        progress: Callable[[int, int, str], None] | None = None,
        use_prefix_cache: bool = True,
        limits: ExecutorLimits | None = None,
    ) -> None:
        self.ready: Future[EngineFacts] = Future()
        self._make_engine = make_engine
        self._loop = loop
        self._deliver = deliver
        self._crashed = crashed
        self._progress = progress if progress is not None else _no_progress
        self._use_prefix_cache = use_prefix_cache
        self._limits = limits if limits is not None else ExecutorLimits()
        # A few commands per request that is open, and as many frames as the links place at once: both are bounded where they come in.
        self._inbox: deque[m.Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._turn_began: float | None = None  # monotonic; None while it sleeps. Written by the step thread alone
        self._counts: tuple[float, EngineCounts] = (0.0, EngineCounts())  # and when they were taken. Written by the step thread alone
        self._events: Events = []
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: m.Command) -> None:
        """Thread-safe; returns at once. Commands are taken in order. Raises StepLoopEndedError."""
        with self._wake:
            if self._stopping:
                raise StepLoopEndedError("the step loop has ended")
            self._inbox.append(command)
            self._wake.notify()

    def post(self, command: m.Command) -> None:
        """As ``submit``, for news that nobody needs once the loop has ended."""
        try:
            self.submit(command)
        except StepLoopEndedError:
            logger.info("%s after the end of the step loop is dropped", type(command).__name__)

    async def close(self, request_id: str) -> None:
        """Submit CloseRequest and wait until the pages are back. A loop that has ended holds nothing any more."""
        done: Future[None] = Future()
        try:
            self.submit(m.CloseRequest(request_id, done))
        except StepLoopEndedError:
            return
        await asyncio.wrap_future(done)

    async def snapshot(self) -> m.Snapshot:
        """Between two steps. Raises StepLoopEndedError."""
        reply: Future[m.Snapshot] = Future()
        self.submit(m.TakeSnapshot(reply))
        return await asyncio.wrap_future(reply)

    @property
    def turn(self) -> float | None:
        """When its turn began, monotonic; None while it sleeps. From any thread."""
        return self._turn_began

    def turn_age_s(self) -> float:
        """How long the step thread has been in its turn: some commands and one step; 0 while it sleeps. From any thread, at once: whether
        it hangs can be told while it does."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def engine_counts(self) -> EngineCounts:
        """As they were when it last slept, or :data:`COUNTS_EVERY_S` ago. From any thread, at once."""
        return self._counts[1]

    def stop(self) -> None:
        """End after the step in flight. Does not wait."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False when it still runs, as while an engine is being loaded."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        give_way()  # before there is an engine: the threads of its framework are started from here, and inherit it
        try:
            engine = self._make_engine()
            engine.warm_up(self._progress)
            executor = Executor(engine, self._emit, self._use_prefix_cache, self._limits)
            facts = EngineFacts(engine.name, engine.config, engine.spec, engine.kv_spec, engine.layout, engine.weights_digest)
        except Exception as error:
            logger.debug("the engine did not start", exc_info=True)  # who waits for `ready` says it in one line
            self.ready.set_exception(error)
            self._abandon(error)
            return
        self._counts = time.monotonic(), executor.engine_counts()
        self.ready.set_result(facts)
        try:
            self._serve(executor)
            self._abandon(StepLoopEndedError("the step loop was stopped"))
        except BaseException as error:
            logger.critical("the step loop crashed", exc_info=True)
            self._abandon(error)
            self._on_event_loop(partial(self._crashed, error))

    def _serve(self, executor: Executor) -> None:
        stepped = False
        while True:
            if not stepped or time.monotonic() - self._counts[0] >= COUNTS_EVERY_S:
                self._counts = time.monotonic(), executor.engine_counts()
            with self._wake:
                while not self._inbox and not stepped and not self._stopping:
                    deadline = executor.next_deadline()
                    timeout = None if deadline is None else deadline - time.monotonic()
                    if timeout is not None and timeout <= 0:
                        break
                    self._turn_began = None
                    self._wake.wait(timeout)
                if self._stopping:
                    self._turn_began = None
                    return
                self._turn_began = time.monotonic()
            self._take_commands(executor)
            executor.expire(time.monotonic())
            executor.admit_waiting()
            self._flush()  # what commands led to does not wait for the step: a coordinator is waiting for pages, or for KV to have come
            stepped = executor.run_step()
            self._flush()

    def _take_commands(self, executor: Executor) -> None:
        placed_bytes = 0
        while True:
            with self._wake:
                if not self._inbox or (placed_bytes > PLACE_BYTES_PER_STEP and executor.has_rows()):
                    return
                command = self._inbox[0]
            if isinstance(command, m.CloseRequest):
                executor.land()
                self._flush()  # or a request that reuses the id could be told what happened to this one
            executor.handle(command)
            if isinstance(command, m.PlaceKV):
                placed_bytes += command.block.values.nbytes
            with self._wake:
                self._inbox.popleft()  # only now: a crash answers what is left, the command it came from included

    def _emit(self, request_id: str, event: m.Event) -> None:
        self._events.append((request_id, event))

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._on_event_loop(partial(self._deliver, events))

    def _on_event_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # closed: the process is ending and nobody listens
            logger.info("events after the end of the event loop are dropped")

    def _abandon(self, reason: BaseException) -> None:
        """Nobody serves the inbox any more: whoever waits for a reply gets ``reason``."""
        with self._wake:
            self._stopping = True
            left, self._inbox = self._inbox, deque()
        for command in left:
            match command:
                case m.CloseRequest():
                    m.resolve(command.done, None)
                case m.PlaceKV():
                    m.fail(command.done, reason)
                case m.TakeSnapshot():
                    m.fail(command.reply, reason)


def _no_progress(done: int, total: int, what: str) -> None:
    """Nobody watches the warm-up."""
