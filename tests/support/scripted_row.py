"""One attach on one scripted worker: what it was told, what it says, and where its script makes it do otherwise."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from pddbridge.rpc.convert import params_from_proto, record_to_proto
from pddbridge.rpc.gen import worker_pb2 as pb
from pddbridge.stops import finish_reason
from tests.support.worker_script import TICK_S, VOCAB_SIZE, record

if TYPE_CHECKING:
    from tests.support.scripted_workers import ScriptedWorker


class Row:
    """One attach on one worker."""

    def __init__(self, worker: ScriptedWorker, command: pb.Open) -> None:
        self.worker = worker
        self.command = command
        self.prompt = list(command.prompt_ids)
        self.params = params_from_proto(command.sampling, VOCAB_SIZE)
        self.log = list(command.log_ids)
        self.given = len(self.log)
        self.decode = command.decode
        self.cap = command.max_propose_tokens if command.HasField("max_propose_tokens") else None
        self.sealed = False
        self.kv_here = asyncio.Event()
        self.changed = asyncio.Event()
        self.stepping = asyncio.Lock()  # commands are taken between steps
        self.events: asyncio.Queue[pb.WorkerEvent | None] = asyncio.Queue()
        self.broken = False
        self.received: asyncio.Task[None] | None = None
        self.targets: asyncio.Queue[pb.PushTarget] = asyncio.Queue()
        for target in command.push_to:
            self.targets.put_nowait(target)

    def emit(self, **event: object) -> None:
        self.events.put_nowait(pb.WorkerEvent(**event))

    def fail(self, code: str, message: str) -> None:
        self.emit(failed=pb.Failed(code=code, message=message))
        self.events.put_nowait(None)

    def die(self) -> None:
        self.broken = True
        self.events.put_nowait(None)

    async def receive(self, tokens: int, num_bytes: int) -> None:
        await self.worker.script.kv_event_gate.wait()
        self.emit(kv_complete=pb.KvComplete(received_tokens=tokens, received_bytes=num_bytes, received_wire_bytes=num_bytes // 2))
        self.has_kv()

    def has_kv(self) -> None:
        if self.worker.script.remembers:
            self.worker.known.add((self.command.tenant, tuple(self.prompt)))
        self.kv_here.set()

    async def ingest(self, command: pb.Ingest) -> None:
        if self.worker.script.break_ingest and command.token_ids:
            self.worker.script.break_ingest = False
            self.die()
            return
        if command.position > len(self.log):
            self.fail("INTERNAL", f"ingest at {command.position}, the log has {len(self.log)}")
            return
        async with self.stepping:
            if not self.take(command):
                return
        self.worker.ingests.append((command.position, tuple(command.token_ids), command.decode))
        await self.kv_here.wait()
        self.emit(ingested=pb.Ingested(length=command.position + len(command.token_ids)))
        if command.decode:
            self.decode, self.sealed = True, False
            if self.cap is not None and len(self.log) >= self.cap:
                self.cap = None
        self.changed.set()

    def take(self, command: pb.Ingest) -> bool:
        for offset, token_id in enumerate(command.token_ids):
            position = command.position + offset
            if position < len(self.log) and self.log[position] != token_id:
                if position < self.given:
                    self.fail("INTERNAL", f"ingest differs at {position}")
                    return False
                del self.log[position:]
                self.worker.rewinds += 1
            if position == len(self.log):
                self.log.append(token_id)
        self.given = max(self.given, command.position + len(command.token_ids))
        return True

    def seal(self) -> None:
        if not self.worker.script.ignore_seal:
            self.sealed = True
            self.emit(sealed=pb.Sealed(length=len(self.log)))

    async def propose(self) -> None:
        script = self.worker.script
        await self.kv_here.wait()
        while True:
            self.changed.clear()
            if not self.decode or self.sealed or finish_reason(self.params, self.log) is not None:
                await self.changed.wait()
                continue
            if self.cap is not None and len(self.log) >= self.cap:
                self.sealed = True
                self.emit(sealed=pb.Sealed(length=len(self.log)))
                continue
            if script.break_at == len(self.log):
                script.break_at = None
                self.die()
                return
            if script.silent_at == len(self.log):
                await asyncio.Event().wait()
            async with self.stepping:
                await asyncio.sleep(script.step_s)
                while script.step_held is not None and script.step_held(len(self.log)):
                    await asyncio.sleep(TICK_S)
                if self.sealed:
                    continue
                chosen = record(self.params, self.prompt, self.log, self.worker.token)
                position = len(self.log)
                if position in script.differs_at:
                    chosen = replace(chosen, token_id=10 + (chosen.token_id - 9) % 290)
                if script.foreign_at == position:
                    script.foreign_at = None
                    chosen = replace(chosen, token_id=VOCAB_SIZE)
                if script.wrong_at == position:
                    position -= 1
                self.log.append(chosen.token_id)
            self.worker.proposed += 1
            self.emit(tokens=pb.Tokens(position=position, records=[record_to_proto(chosen)]))
