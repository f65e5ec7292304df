"""Sends sessions to a target: each a task of its own, its turns one after another, no more at a time than allowed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from pdd.bench.serve.client import Record, Target, client, send
from pdd.bench.serve.sessions import Session, Turn


@dataclass(frozen=True)
class LoadPlan:
    """``max_concurrency``: requests at a time, None: as many as come · ``ignore_eos``, ``temperature``: sampling · ``cache_salt``: keeps a
    run's prefixes apart from others' at endpoints that know it; None: not sent · ``token_text``: for chat endpoints: ids to a text.
    """

    max_concurrency: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0
    cache_salt: str | None = None
    token_text: Callable[[Sequence[int]], str] | None = None


@dataclass(frozen=True)
class Run:
    """``records`` in the order in which they were sent · ``duration_s``: from the start to the last answer · ``largest_late_s``: how far
    the client itself fell behind the arrival times · ``invented_answers``: whose ids the endpoint did not tell, though turns continue them.
    """

    records: list[Record]
    duration_s: float
    largest_late_s: float
    invented_answers: int
    max_concurrent: int


async def run_load(target: Target, sessions: Sequence[Session], plan: LoadPlan, ended: Callable[[Record], None]) -> Run:
    """Every session to its end. A turn that fails ends its session: what would follow cannot be asked. ``ended``: told of each request."""
    load = _Load(target, plan, ended)
    async with client(target, plan.timeout_s) as http:
        started_s = time.perf_counter()
        await asyncio.gather(*(load.session(http, session, started_s) for session in sessions))
        duration_s = time.perf_counter() - started_s
    load.records.sort(key=lambda record: record.start_s)
    return Run(load.records, duration_s, load.largest_late_s, load.invented_answers, load.max_concurrent)


class _Load:
    def __init__(self, target: Target, plan: LoadPlan, ended: Callable[[Record], None]) -> None:
        self.records: list[Record] = []
        self.largest_late_s = 0.0
        self.invented_answers = 0
        self.max_concurrent = 0
        self._concurrent = 0
        self._target = target
        self._plan = plan
        self._ended = ended
        self._room = None if plan.max_concurrency is None else asyncio.Semaphore(plan.max_concurrency)

    async def session(self, http: httpx.AsyncClient, session: Session, started_s: float) -> None:
        due_s = started_s + (session.start_s or 0.0)
        said: list[int] = []
        for number, turn in enumerate(session.turns):
            due_s += turn.wait_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            self.largest_late_s = max(self.largest_late_s, time.perf_counter() - due_s)
            prompt = [*said, *turn.prompt_ids] if turn.continues else list(turn.prompt_ids)
            async with self._room or contextlib.nullcontext():
                record = Record(session.name, number, time.perf_counter() - started_s, len(prompt))
                self._concurrent += 1
                self.max_concurrent = max(self.max_concurrent, self._concurrent)
                await send(http, self._target, record, self._body(prompt, turn))
                self._concurrent -= 1
            self.records.append(record)
            self._ended(record)
            if record.error:
                return
            due_s = time.perf_counter()
            if number + 1 < len(session.turns) and session.turns[number + 1].continues:
                said = [*prompt, *self._answer(record, turn)]

    def _answer(self, record: Record, turn: Turn) -> Sequence[int]:
        if len(record.token_ids) == record.output_tokens:
            return record.token_ids
        self.invented_answers += 1
        return turn.answer_ids[: record.output_tokens]

    def _body(self, prompt: Sequence[int], turn: Turn) -> dict[str, object]:
        plan = self._plan
        body: dict[str, object] = {"max_tokens": turn.output_tokens, "temperature": plan.temperature}
        if plan.ignore_eos:
            body["ignore_eos"] = True
        if plan.cache_salt is not None:
            body["cache_salt"] = plan.cache_salt
        if self._target.backend == "openai":
            return {**body, "prompt": list(prompt)}
        if plan.token_text is None:
            raise ValueError("backend openai-chat: a tokenizer is needed to make texts of token ids")
        return {**body, "messages": [{"role": "user", "content": plan.token_text(prompt)}]}
