"""L3: tokens of handoff runs equal those of one engine alone, wherever the handoff falls, greedy and sampled.

One direction is one batch on the receiver: a row per sampler and handoff position gets the sender's prompt KV by the wire and the sender's
first k tokens as ids, ingests them in one extend beside the others, and goes on. A relay's tokens are those of the sender alone: relay
and single-engine run are the same steps. Beside them each sampler has a row that ingests the sender's tokens one at a time and says what it
would have chosen: the audit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pdd.conform.compare import largest, worst_relative
from pdd.conform.judge import Judgement, Stream, judge_alone, judge_audit, judge_streams
from pdd.conform.oracle import Oracle
from pdd.conform.plan import Plan, Tolerance
from pdd.conform.report import Audit, Check, within
from pdd.conform.steps import Row, ScatteredPages, decode, poison, prefill, step_of
from pdd.conform.wire import move_kv
from pddbridge.engine import Engine
from pddbridge.kv_spec import TokenRange


@dataclass(frozen=True)
class Alone:
    """What one engine made of the prompt by itself: its prompt KV's pages [P] i32, and per sampler its tokens."""

    engine: Engine
    pages: np.ndarray
    streams: dict[str, list[int]]


@dataclass
class _HandedOver:
    """A row on the receiver: ``log`` grows; ``given``: tokens to ingest first. An audited row takes the next given token, whatever it
    chose itself (``chosen``).
    """

    sampler: str
    given: list[int]
    audited: bool
    pages: np.ndarray
    log: list[int]
    chosen: list[int] = field(default_factory=list)


def run_alone(engine: Engine, prompt: np.ndarray, plan: Plan) -> Alone:
    """``plan.stream_tokens`` tokens per sampler, each stream the only row of its steps. The prompt's KV, but for its last token, stays."""
    pages = ScatteredPages(engine, plan.seed)
    kept = pages.take(len(prompt))
    prefill(engine, prompt[:-1], kept)
    streams = {}
    for name, params in plan.samplers.items():
        own = pages.take(len(prompt) + plan.stream_tokens)
        prefill(engine, prompt[:-1], own)
        streams[name] = decode(engine, prompt, own, plan.stream_tokens, params)
    return Alone(engine, kept, streams)


def check_alone(alone: Alone, oracle: Oracle, way: str, prompt: np.ndarray, plan: Plan, tolerance: Tolerance) -> tuple[Check, ...]:
    """Every token of a stream against the oracle's choice after the same tokens."""
    checks = []
    for name, params in plan.samplers.items():
        found = judge_alone(alone.streams[name], oracle, prompt.tolist(), params)
        note = f"{found.num_equal} of {plan.stream_tokens} tokens are the oracle's choice"
        checks.append(_check(alone.engine, way, f"{name} stream against the oracle", found, note, tolerance))
    return tuple(checks)


def check_handoffs(
    sender: Alone, receiver: Engine, oracle: Oracle, way: str, prompt: np.ndarray, plan: Plan, tolerance: Tolerance
) -> tuple[Check, ...]:
    """``receiver``'s pool is used up; nothing of it is kept."""
    rows = _take_over(sender, receiver, prompt, plan)
    _go_on(receiver, rows, prompt, plan)
    checks = []
    for name, params in plan.samplers.items():
        streams = [Stream(len(row.given), row.log) for row in rows if row.sampler == name and not row.audited]
        found = judge_streams(streams, sender.streams[name], oracle, prompt.tolist(), params)
        note = f"{found.num_equal} of {len(streams)} handoffs give the sender's own tokens"
        checks.append(_check(receiver, way, f"{name} handoffs", found, note, tolerance))
    for row in rows:
        if row.audited:
            given = row.given[: len(row.chosen)]
            found = judge_audit(row.chosen, given, oracle, prompt.tolist(), plan.samplers[row.sampler])
            audit = Audit(len(given), len(given) - found.num_equal)
            checks.append(replace(_check(receiver, way, f"{row.sampler} audit", found, "", tolerance), audit=audit))
    return (*checks, _check_ingested(receiver, rows, way, prompt, tolerance))


def _take_over(sender: Alone, receiver: Engine, prompt: np.ndarray, plan: Plan) -> list[_HandedOver]:
    """The rows, each with the prompt's KV in pages that were full of NaN before."""
    pages = ScatteredPages(receiver, plan.seed + 1)
    rows = []
    for name in plan.samplers:
        for handoff in (*plan.handoffs, None):
            own = pages.take(len(prompt) + plan.stream_tokens)
            poison(receiver, own)
            move_kv(sender.engine, sender.pages, receiver, own, TokenRange(0, len(prompt) - 1), plan.seed)
            stream = sender.streams[name]
            log = [] if handoff is None else stream[:handoff]
            rows.append(_HandedOver(name, stream if handoff is None else log, handoff is None, own, list(log)))
    return rows


def _go_on(receiver: Engine, rows: Sequence[_HandedOver], prompt: np.ndarray, plan: Plan) -> None:
    """``plan.new_tokens`` steps of all rows together; the first ingests what each was given."""
    in_kv = [len(prompt) - 1] * len(rows)
    for _ in range(plan.new_tokens):
        batch = []
        for index, row in enumerate(rows):
            tokens = np.concatenate((prompt, np.array(row.log, np.int32)))
            log_ids = np.array(row.log, np.int32)
            params = plan.samplers[row.sampler]
            batch.append(Row(tokens[in_kv[index] :], in_kv[index], row.pages, params=params, prompt_ids=prompt, log_ids=log_ids))
            in_kv[index] = len(tokens)
        for row, record in zip(rows, receiver.step(step_of(*batch)).records, strict=True):
            if row.audited:
                row.chosen.append(record.token_id)
                row.log.append(row.given[len(row.log)])
            else:
                row.log.append(record.token_id)


def _check(engine: Engine, way: str, what: str, found: Judgement, note: str, tolerance: Tolerance) -> Check:
    passed = within(found.margin, tolerance.tie)
    return Check(
        "L3", engine.config.compute_dtype, way, what, passed, found.margin, tolerance.tie, found.where, note, parting=found.parting
    )


def _check_ingested(receiver: Engine, rows: Sequence[_HandedOver], way: str, prompt: np.ndarray, tolerance: Tolerance) -> Check:
    """KV of relayed tokens computed in one extend against the same tokens one at a time: replay is not decode, but must be near it."""
    audited = next(row for row in rows if row.audited)
    extended = max((row for row in rows if not row.audited and row.sampler == audited.sampler), key=lambda row: len(row.given))
    count = min(len(extended.given), len(audited.chosen) - 1)
    tokens = TokenRange(len(prompt) - 1, len(prompt) + count)
    found = []
    for one, other in zip(receiver.read_kv(extended.pages, tokens), receiver.read_kv(audited.pages, tokens), strict=True):
        worst = worst_relative(one.values, other.values)
        layer, token, head, _ = worst.place
        found.append((worst, f"{one.plane} layer {one.layers.start + layer} head {head} token {tokens.start + token}"))
    worst, where = largest(found)
    passed = within(worst.error, tolerance.kv)
    what = "KV, one extend against stepwise"
    return Check("L3", receiver.config.compute_dtype, way, what, passed, worst.error, tolerance.kv, where)
