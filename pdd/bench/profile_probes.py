"""What `pdd profile` measures: short requests to a deployment of its own, alone and beside others that decode. No scenario is replayed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import numpy as np

from pdd.bench.modes import Mode
from pdd.bench.serve.client import Record, Target, send
from pdd.sim.fit import BesideRun, DecodeRun, ExtendRun, FarRun, LinkRun, Measured, PrefillRun

_SIZES = 16  # of a prefill step, evenly up to its most tokens: an engine that pads steps has stairs, not a line
_LONG_STEPS = (2, 4, 6)  # of long prompts, for what attention adds
_SHORT_PROMPT = 33  # KV of all tokens but the last is computed
_LINK_PROMPTS = (129, 1025)
_BESIDE_PROMPT = 513
_KNOWN = (500, 1500)  # tokens that caches hold of a prompt
_KNOWN_NEW = (33, 129)  # that it has more
_DECODES = ((1, 250), (4, 250), (7, 250), (4, 1100))  # rows, context; a relay of eight has room for the probe, too
_FAR_ROWS = (2, 4)  # at main, whose tokens cross the link
_BOTH_ROWS = (1, 2, 4)  # at relay and at main
_EXTENDS = (8, 136)  # log tokens that main is given at once
_YARD_PROMPTS = (257, 513)
_YARD_ROWS = 2
_ALONE_ROUNDS = 4
_SLOW_ROUNDS = 2  # of what takes seconds and varies little
_ROUNDS = 3
_WATCH_S = 1.5
_HELD_BY: Mapping[str, Mode] = {"relay": "pdd", "main": "same_site", "far": "cross_site"}
_SETTLE_S = 0.4
_ENDLESS = 2000
_FIRST_PIECES = 3


@dataclass(frozen=True)
class _Row:
    """A request that decodes until the probe is over. ``role``: where; "far": at main, over the link."""

    role: str
    record: Record
    task: asyncio.Task[None]

    def tokens(self, from_s: float, to_s: float) -> int:
        start_s = self.record.start_s
        return sum(tokens for at_s, tokens in self.record.pieces if from_s < start_s + at_s <= to_s)


class Prober:
    """``targets``: the doors of one deployment's modes. ``has_relay``: whether probes of a relay make sense · ``step_tokens``: of a prefill
    step at most · ``seed``: another one for each prober of a deployment, whose caches know what the others asked.
    """

    def __init__(
        self, http: httpx.AsyncClient, targets: Mapping[Mode, Target], vocab_size: int, has_relay: bool, step_tokens: int, seed: int = 0
    ) -> None:
        self._http = http
        self._targets = targets
        self._vocab_size = vocab_size
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._number = 0
        self._roles: tuple[str, ...] = ("relay", "main") if has_relay else ("main",)
        sizes = sorted({max(1, step_tokens * part // _SIZES) for part in range(1, _SIZES + 1)})
        self._prompts = [tokens + 1 for tokens in (*sizes, *(step_tokens * steps for steps in _LONG_STEPS))]

    async def measure(self, told: Callable[[str], None]) -> Measured:
        """Raises ValueError when a probe fails."""
        found = Measured()
        for mode in self._targets:
            await self._ask(mode, _BESIDE_PROMPT, 4)  # what the first request warms is not what is measured
        for number in range(_ALONE_ROUNDS):
            told(f"one request at a time, {number + 1} of {_ALONE_ROUNDS}")
            await self._alone(found, self._prompts)
        told("one request at a time, over the link, by relay, known in part")
        for _ in range(_ALONE_ROUNDS):
            await self._alone_over_the_link(found)
        for _ in range(_SLOW_ROUNDS):
            await self._alone_from_relay_to_main(found)
        await self._known(found)
        for rows, context in _DECODES:
            for role in self._roles:
                told(f"prefill beside {rows} rows of {context} tokens at {role}")
                async with self._decoding([role] * rows, context) as held:
                    for _ in range(_ROUNDS):
                        await self._beside(found, held, context)
        if len(self._roles) > 1:
            for rows in _BOTH_ROWS:
                told(f"prefill beside {rows} rows at relay and at main")
                async with self._decoding(["relay", "main"] * rows, _DECODES[0][1]) as held:
                    for _ in range(_ROUNDS):
                        await self._beside(found, held, _DECODES[0][1])
        for rows in _FAR_ROWS:
            told(f"{rows} rows at main, over the link")
            async with self._decoding(["far"] * rows, _DECODES[0][1]) as held:
                for _ in range(_ROUNDS):
                    await self._far(found, held, _DECODES[0][1])
        told("main beside a transfer")
        async with self._decoding(["main"], _DECODES[0][1]) as held:
            for _ in range(_ROUNDS):
                probe = await self._ask("cross_site", _LINK_PROMPTS[-1], 2)
                done, arrived = (probe.start_s + _time(probe, key) for key in ("prefill_done_s", "main_kv_s"))
                found.beside_link.append(DecodeRun("main", 1, _DECODES[0][1], _itl_s(held, done, arrived), ("link",)))
        return found

    async def yardstick(self) -> Measured:
        """Ten seconds of probes by which one tells how fast the machine is just now: prompts alone, beside main, and beside main and relay.
        Raises ValueError when one fails.
        """
        found, context = Measured(), _DECODES[0][1]
        await self._ask("same_site", _SHORT_PROMPT, 4)  # after a pause
        await self._alone(found, _YARD_PROMPTS)
        for roles in dict.fromkeys([("main",), self._roles]):
            async with self._decoding(list(roles) * _YARD_ROWS, context) as held:
                await self._beside(found, held, context)
        await self._alone(found, _YARD_PROMPTS)
        return found

    async def _alone(self, found: Measured, prompts: Sequence[int]) -> None:
        for tokens in prompts:
            record = await self._ask("same_site", tokens, 3, pipeline="direct")
            found.prefills.append(PrefillRun(tokens - 1, _time(record, "prefill_done_s")))
            found.main_firsts_s.append(record.ttft_s - _time(record, "prefill_done_s"))

    async def _known(self, found: Measured) -> None:
        for known in _KNOWN:
            prompt, salt = self._ids(known), self._salt()
            await self._ask("same_site", known, 2, prompt, salt, pipeline="direct")
            for new in _KNOWN_NEW * _ROUNDS:
                record = await self._ask("same_site", 0, 3, prompt + self._ids(new), salt, pipeline="direct")
                found.hits.append(PrefillRun(new - 1, _time(record, "prefill_done_s"), known))
                twin = await self._ask("same_site", new, 3, pipeline="direct")
                found.hit_twins.append(PrefillRun(new - 1, _time(twin, "prefill_done_s")))

    async def _alone_over_the_link(self, found: Measured) -> None:
        for tokens in _LINK_PROMPTS:
            record = await self._ask("cross_site", tokens, 3, pipeline="direct")
            stored, coded = (int(record.timeline[key] or 0) for key in ("wan_kv_bytes", "wan_kv_wire_bytes"))
            found.links.append(LinkRun(tokens - 1, _time(record, "prefill_done_s"), record.ttft_s, stored, coded))
        if len(self._roles) > 1:
            for tokens in _LINK_PROMPTS:
                record = await self._ask("pdd", tokens, 3, pipeline="local")
                found.pushes.append(PrefillRun(tokens - 1, _time(record, "prefill_done_s")))
                found.relay_firsts_s.append(record.ttft_s - _time(record, "prefill_done_s"))

    async def _alone_from_relay_to_main(self, found: Measured) -> None:
        if len(self._roles) > 1:
            for backlog in _EXTENDS:
                record = await self._ask("pdd", _SHORT_PROMPT, backlog + 4, pipeline="relay", handoff="one_shot", handoff_at=backlog)
                found.extends.append(ExtendRun(backlog, _time(record, "handoff_done_s") - _time(record, "handoff_start_s")))

    async def _beside(self, found: Measured, held: Sequence[_Row], context: int) -> None:
        roles = tuple(dict.fromkeys(row.role for row in held))
        began = time.perf_counter()
        await asyncio.sleep(_WATCH_S)
        alone = self._steps(held, context, began, time.perf_counter(), roles)
        found.decodes += alone
        role = roles[-1]  # main, where it has rows
        mode: Mode = "same_site" if role == "main" else "pdd"
        pipeline = "direct" if role == "main" else "local"
        short, long = [await self._ask(mode, tokens, 2, pipeline=pipeline) for tokens in (_SHORT_PROMPT, _BESIDE_PROMPT)]
        done_s = [_time(probe, "prefill_done_s") for probe in (short, long)]
        firsts_s = tuple(probe.ttft_s - at_s for probe, at_s in zip((short, long), done_s, strict=True))
        sizes = (_SHORT_PROMPT - 1, done_s[0], _BESIDE_PROMPT - 1, done_s[1])
        found.prefills_beside.append(BesideRun(role, ("prefill", *roles), alone[-1].seconds, *sizes, firsts_s))
        found.decodes_beside += self._steps(held, context, long.start_s, long.start_s + done_s[1], ("prefill", *roles))

    async def _far(self, found: Measured, held: Sequence[_Row], context: int) -> None:
        began = time.perf_counter()
        await asyncio.sleep(_WATCH_S)
        (alone,) = self._steps(held, context, began, time.perf_counter(), ("main",))
        probe = await self._ask("same_site", _BESIDE_PROMPT, 2, pipeline="direct")
        prefill_s = _time(probe, "prefill_done_s")
        record = await self._ask("cross_site", _SHORT_PROMPT, 2, pipeline="direct")
        stored, coded = (int(record.timeline[key] or 0) for key in ("wan_kv_bytes", "wan_kv_wire_bytes"))
        link = LinkRun(_SHORT_PROMPT - 1, _time(record, "prefill_done_s"), record.ttft_s, stored, coded)
        found.far.append(FarRun(alone.rows, alone.context, alone.seconds, PrefillRun(_BESIDE_PROMPT - 1, prefill_s), link))

    def _steps(self, held: Sequence[_Row], context: int, from_s: float, to_s: float, busy: tuple[str, ...]) -> list[DecodeRun]:
        """What a step took each role meanwhile."""
        found = []
        for role in dict.fromkeys(row.role for row in held):
            rows = [row for row in held if row.role == role]
            grown = context + round(np.mean([sum(tokens for _, tokens in row.record.pieces) for row in rows]))
            found.append(DecodeRun(role, len(rows), grown, _itl_s(rows, from_s, to_s), busy))
        return found

    @asynccontextmanager
    async def _decoding(self, roles: Sequence[str], context: int) -> AsyncIterator[list[_Row]]:
        """A row per entry of ``roles``, all past their first tokens; they share a prompt, so that it is prefilled once."""
        prompt, salt = self._ids(context), self._salt()
        held: list[_Row] = []
        try:
            for role in roles:
                mode: Mode = _HELD_BY[role]
                record = Record("row", len(held), time.perf_counter(), context)
                body = self._body(prompt, _ENDLESS, salt, {"pipeline": "local" if role == "relay" else "direct"})
                held.append(_Row(role, record, asyncio.create_task(send(self._http, self._targets[mode], record, body))))
                first_of_role = sum(row.role == role for row in held) == 1
                while first_of_role and not record.pieces and not held[-1].task.done():
                    await asyncio.sleep(_SETTLE_S / 10)
            while any(len(row.record.pieces) < _FIRST_PIECES and not row.task.done() for row in held):
                await asyncio.sleep(_SETTLE_S / 10)
            failed = [row.record.error for row in held if row.task.done()]
            if failed:
                raise ValueError(f"a row of a probe ended: {failed[0] or 'it said everything'}")
            await asyncio.sleep(_SETTLE_S)
            yield held
        finally:
            for row in held:
                row.task.cancel()
            await asyncio.gather(*(row.task for row in held), return_exceptions=True)
            await asyncio.sleep(_SETTLE_S)

    async def _ask(
        self,
        mode: Mode,
        tokens: int,
        output_tokens: int,
        prompt: list[int] | None = None,
        salt: str | None = None,
        **override: str | int,
    ) -> Record:
        """``tokens`` at random, unless it is to be ``prompt``."""
        ids = self._ids(tokens) if prompt is None else prompt
        record = Record("probe", self._number, time.perf_counter(), len(ids))
        await send(self._http, self._targets[mode], record, self._body(ids, output_tokens, salt or self._salt(), override))
        if record.error:
            raise ValueError(f"a probe failed: {record.error}")
        return record

    def _body(self, prompt: Sequence[int], output_tokens: int, salt: str, override: Mapping[str, str | int]) -> dict[str, object]:
        wish = {"report_origin": True, "timeline": True, **override}
        sampling = {"max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
        return {"prompt": list(prompt), "cache_salt": salt, "pdd": wish, **sampling}

    def _ids(self, count: int) -> list[int]:
        found: list[int] = self._rng.integers(self._vocab_size // 2, self._vocab_size, size=count).tolist()
        return found

    def _salt(self) -> str:
        self._number += 1
        return f"profile-{self._seed}-{self._number}"


def _itl_s(rows: Sequence[_Row], from_s: float, to_s: float) -> float:
    """Seconds per token of a row. Raises ValueError when none came."""
    tokens = sum(row.tokens(from_s, to_s) for row in rows)
    if tokens == 0:
        raise ValueError(f"no token came within {to_s - from_s:.1f} s")
    return (to_s - from_s) * len(rows) / tokens


def _time(record: Record, key: str) -> float:
    value = record.timeline.get(key)
    if not isinstance(value, int | float):
        raise ValueError(f"a probe's timeline has no {key}: {record.timeline}")
    return float(value)
