"""L2: each engine against the float32 oracle: logits of chunks, extends and decode rows, alone and in one batch, and the KV it leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pdd.conform.compare import largest, worst_relative
from pdd.conform.oracle import Oracle, OraclePass
from pdd.conform.plan import MIXED_STEP, Tolerance
from pdd.conform.report import Check, within
from pdd.conform.steps import Row, ScatteredPages, prefill, step_of
from pddbridge.engine import Engine, KVBlock
from pddbridge.kv_spec import TokenRange

_LONGEST = 130
# New tokens of the steps that walk through a prompt (cyclic): chunks, decode rows, extends.
_WALK = (37, 1, 1, 5, 1, 17)


def check_engine(engine: Engine, oracle: Oracle, way: str, prompt: np.ndarray, tolerance: Tolerance, seed: int) -> tuple[Check, ...]:
    """``prompt`` [n] i32; of a long one the first tokens."""
    ids = prompt[:_LONGEST]
    want = oracle.run(ids.tolist())
    pages = ScatteredPages(engine, seed)
    table = pages.take(len(ids))
    walked = list(_walk(engine, ids, table))
    logits = _check(engine, way, "logits, row alone", [(f"position {at}", got, want.logits[at]) for at, got in walked], tolerance.logits)
    mixed = _check(engine, way, "logits, rows of a batch", list(_mixed(engine, oracle, ids, pages)), tolerance.logits)
    return logits, mixed, _check_kv(engine, way, engine.read_kv(table, TokenRange(0, len(ids))), want, tolerance.kv)


def _walk(engine: Engine, ids: np.ndarray, pages: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(position, logits [V]) of the last token of every step."""
    start, turn = 0, 0
    while start < len(ids):
        stop = min(len(ids), start + min(_WALK[turn % len(_WALK)], engine.config.max_step_tokens))
        yield stop - 1, engine.logits(step_of(Row(ids[start:stop], start, pages)))[0]
        start, turn = stop, turn + 1


@dataclass(frozen=True)
class _MixedRow:
    """``ids``, whose last token is a decode step and the ``num_new`` before it one step of a batch."""

    ids: np.ndarray
    num_new: int
    pages: np.ndarray
    want: np.ndarray

    def at(self, step: int) -> tuple[int, int]:
        """The tokens [start, stop) that are new in step 0 and in step 1."""
        end = len(self.ids) - 1
        return (end - self.num_new, end) if step == 0 else (end, end + 1)


def _mixed(engine: Engine, oracle: Oracle, ids: np.ndarray, pages: ScatteredPages) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """A chunk, an extend and a decode row in one step, then all of them as decode rows. Each is a part of ``ids`` of its own length."""
    rows = []
    for start, share, num_new in zip((0, 3, 7), (1.0, 0.6, 0.4), MIXED_STEP, strict=True):
        own = ids[start : start + max(3, int(len(ids) * share))]
        row = _MixedRow(own, min(num_new, len(own) - 1), pages.take(len(own)), oracle.run(own.tolist()).logits)
        prefill(engine, own[: row.at(0)[0]], row.pages)
        rows.append(row)
    for step in (0, 1):
        spans = [row.at(step) for row in rows]
        batch = [Row(row.ids[start:stop], start, row.pages) for row, (start, stop) in zip(rows, spans, strict=True)]
        for index, got in enumerate(engine.logits(step_of(*batch))):
            position = spans[index][1] - 1
            yield f"row {index} of {len(rows)}, position {position}", got, rows[index].want[position]


def _check(engine: Engine, way: str, what: str, compared: Sequence[tuple[str, np.ndarray, np.ndarray]], tolerance: float) -> Check:
    worst, place = largest([(worst_relative(got, want), where) for where, got, want in compared])
    where = f"{place}, id {worst.place[0]}"
    return Check("L2", engine.config.compute_dtype, way, what, within(worst.error, tolerance), worst.error, tolerance, where)


def _check_kv(engine: Engine, way: str, blocks: Sequence[KVBlock], want: OraclePass, tolerance: float) -> Check:
    found = []
    planes = {"k": want.keys, "v": want.values}
    for block in blocks:
        by_layer = planes[block.plane]
        for layer, values in enumerate(block.values):
            wanted = by_layer[block.layers.start + layer]
            first = len(values) - len(wanted)  # a sliding-window layer of the oracle keeps its last tokens only
            worst = worst_relative(values[first:], wanted)
            token, head, _ = worst.place
            found.append((worst, f"{block.plane} layer {block.layers.start + layer} head {head} token {first + token}"))
    worst, where = largest(found)
    return Check("L2", engine.config.compute_dtype, way, "KV", within(worst.error, tolerance), worst.error, tolerance, where)
