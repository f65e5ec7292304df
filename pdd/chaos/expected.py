"""What each request should get: the tokens of one worker that runs it alone, through the same stop rules. Owns that worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

import grpc
import grpc.aio

from pdd.chaos.shapes import SHAPES, launch_config
from pdd.chaos.traffic import Ask
from pdd.chaos.watch import wait_ready
from pdd.conform.oracle import Oracle, verdicts
from pdd.conform.single_run import single_engine_run
from pdd.launch.local import Deployment
from pdd.serving.acceptor import Acceptor
from pdd.serving.request import GenerationRequest, Override
from pdd.serving.text.model import TextModel
from pddbridge.sampling_params import TokenRecord

log = logging.getLogger(__name__)

_WORKER = "prefill-0"
_AT_ONCE = 4
ATTEMPTS = 4
# Logits of float32 engines differ in the last bits with the order of summation; two candidates that near are both right.
TIE = 1e-3


@dataclass(frozen=True)
class Expected:
    """``ids``: what is streamed · ``text``: of all of them · ``finish_reason``: "stop" or "length"."""

    ids: tuple[int, ...]
    text: str
    finish_reason: str


class ExpectedAnswers:
    """A worker process of its own, in no coordinator's topology, and the text side. Use as a context manager."""

    def __init__(self, model_dir: Path, cache_dir: Path, engine: str, deadline_s: float) -> None:
        self._text = TextModel.load(model_dir)
        self._oracle = Oracle(model_dir)
        self._deployment = Deployment(launch_config(SHAPES["lean"], str(model_dir), (engine, engine, engine)), cache_dir)
        self._deployment.write_files("main", self._deployment.config, self._deployment.topology)
        self._deployment.start_worker(_WORKER)
        self._address = str(self._deployment.topology.worker(_WORKER).control)
        self._deadline_s = deadline_s

    def __enter__(self) -> ExpectedAnswers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._deployment.stop()

    def of(self, asks: Sequence[Ask]) -> list[Expected]:
        """In order. Each prompt has a prefix cache of its own, so nothing but the request decides."""
        wait_ready(self._address, 0, time.monotonic() + self._deadline_s)

        async def run() -> list[Expected]:
            gate = asyncio.Semaphore(_AT_ONCE)

            async def one(ask: Ask) -> Expected:
                async with gate:
                    ids = await again_when_lost(
                        partial(single_engine_run, self._address, ask.prompt, ask.params(), tenant=f"{ask.salt}-{ask.number}")
                    )
                return self._through_the_door(ask, ids)

            return list(await asyncio.gather(*map(one, asks)))

        return asyncio.run(run())

    def text_of(self, ask: Ask, ids: Sequence[int]) -> str:
        """What ``ids``, a prefix of the answer, release: text that may still become a stop string is held back."""
        return self._through_the_door(ask, ids).text

    def is_tie(self, ask: Ask, ids: Sequence[int]) -> bool:
        """Whether every token of ``ids`` is right within rounding, by a float32 pass over them: a differing answer is then right, too."""
        return all(verdict.margin <= TIE for verdict in verdicts(self._oracle, ask.prompt, ids, ask.params()))

    def _through_the_door(self, ask: Ask, ids: Sequence[int]) -> Expected:
        request = GenerationRequest(
            request_id="expected",
            tenant="expected",
            prompt_ids=ask.prompt,
            sampling=ask.params(),
            stop_strings=ask.stop,
            want_text=True,
            timeout_s=1.0,
            override=Override(),
        )
        acceptor = Acceptor(request, self._text)
        text, kept = "", list[int]()
        for position, token_id in enumerate(ids):
            delta = acceptor.accept(position, TokenRecord(token_id), "main")
            if delta is None:
                break
            kept.append(token_id)
            text += delta.text
        return Expected(tuple(kept), text, acceptor.finish_reason or "")


async def again_when_lost(run: Callable[[], Awaitable[list[int]]]) -> list[int]:
    """Runs again where the call was lost and not the request: on a machine that is busy enough a ping goes unanswered for seconds. Raises
    what the last of a few attempts does.
    """
    attempt = 1
    while True:
        try:
            return await run()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or attempt == ATTEMPTS:
                raise
            log.warning("the worker that says what is right was lost in attempt %d of %d: %s", attempt, ATTEMPTS, error.details())
            attempt += 1
