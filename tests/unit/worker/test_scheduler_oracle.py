"""The scheduler against an oracle that hands out one token at a time, and whole runs of many steps, over thousands of seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from pdd.fairness import COMPUTED_WEIGHT, SAMPLED_WEIGHT, TenantService
from pdd.worker.scheduler import PlannedRow, RowDemand, StepBudget, plan_step


def oracle(demands: list[RowDemand], budget: StepBudget) -> dict[str, int]:
    """Tokens per request of the next step: whoever deserves the next token most gets it, until nobody may have another."""
    waiting_chunks = [d for d in demands if not (d.samples and d.num_pending == 1)]
    decodes = [d for d in demands if d.samples and d.num_pending == 1]
    tokens: dict[str, int] = {}
    slots = min(budget.max_rows, budget.max_step_tokens)

    def serve_decodes(up_to: int) -> None:
        while len(tokens) < up_to and (left := [d for d in decodes if d.request_id not in tokens]):
            tokens[min(left, key=lambda d: (d.last_step, d.order)).request_id] = 1

    if not waiting_chunks:
        serve_decodes(slots)
        return tokens
    turn_of_decode = (
        slots == 1 and bool(decodes) and min((d.last_step, d.order) for d in decodes) < min((d.last_step, d.order) for d in waiting_chunks)
    )
    serve_decodes(slots if turn_of_decode else slots - 1)
    if any(d.chunks_waited >= budget.max_decode_wait_chunks for d in decodes if d.request_id not in tokens):
        serve_decodes(slots)
        return tokens
    rows_left, tokens_left = budget.max_rows - len(tokens), budget.max_step_tokens - len(tokens)
    if rows_left == 0 or tokens_left == 0:
        return tokens
    if rows_left == 1:
        line = [min(waiting_chunks, key=lambda d: (d.last_step, d.order))]
    else:
        head = min(waiting_chunks, key=lambda d: (d.tenant_service, d.order))
        others = [d for d in waiting_chunks if d is not head]
        line = [head, *sorted(others, key=lambda d: (d.tenant_service, d.num_pending, d.order))]
    head_share = (tokens_left + 1) // 2 if len(line) > 1 else tokens_left
    for _ in range(tokens_left):
        have = {d.request_id: tokens.get(d.request_id, 0) for d in line}
        open_rows = sum(1 for n in have.values() if n)
        may = [d for d in line if have[d.request_id] < d.num_pending and (have[d.request_id] or open_rows < rows_left)]
        if not may:
            break
        if line[0] in may and have[line[0].request_id] < head_share:
            chosen = line[0]
        else:
            chosen = next((d for d in may if d is not line[0]), line[0])
        tokens[chosen.request_id] = have[chosen.request_id] + 1
    return tokens


@pytest.mark.parametrize("first_seed", range(0, 4000, 500))
def test_plans_are_the_oracles(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 500):
        rng = random.Random(seed)
        demands = [
            RowDemand(
                f"r{order}",
                order,
                num_pending=rng.choice((1, 1, 1, 2, rng.randint(1, 60))),
                samples=rng.random() < 0.7,
                last_step=rng.randint(0, 6),
                chunks_waited=rng.choice((0, 0, 1, 2)),
                tenant_service=rng.choice((0, 0, 5, 9)),
            )
            for order in range(rng.randint(1, 12))
        ]
        budget = StepBudget(rng.choice((1, 2, 7, 32, 64)), rng.choice((1, 2, 3, 8)), rng.choice((1, 2)))
        rows = plan_step(demands, budget).rows
        by_id = {d.request_id: d for d in demands}
        assert {row.request_id: row.num_tokens for row in rows} == oracle(demands, budget), seed
        for row in rows:
            assert row == PlannedRow(
                row.request_id, row.num_tokens, by_id[row.request_id].samples and row.num_tokens == by_id[row.request_id].num_pending
            )


@dataclass
class Job:
    """A request as a whole run sees it: a prompt of ``prompt`` tokens, then ``output`` decode steps."""

    tenant: str
    arrives: int
    prompt: int
    output: int


@dataclass
class Outcome:
    steps: int
    worst_wait: int  # steps with a chunk between two rows of a decode that was ready for both
    service: dict[str, list[int]]  # per tenant, its counter after each step while it had work


def run(jobs: list[Job], budget: StepBudget) -> Outcome:
    """Step by step until all is done, with everybody's waiting counted here and not by the scheduler."""
    service, live, worst = TenantService(), {}, 0
    history: dict[str, list[int]] = {job.tenant: [] for job in jobs}
    for step in range(1, 20_000):
        for order, job in enumerate(jobs):
            if job.arrives == step:
                service.arrive(job.tenant)
                live[f"r{order}"] = (job, RowDemand(f"r{order}", order, job.prompt, True, 0))
        if not live:
            if all(job.arrives < step for job in jobs):
                return Outcome(step, worst, history)
            continue
        demands = [replace(d, tenant_service=service.of(job.tenant)) for job, d in live.values()]
        rows = {row.request_id: row for row in plan_step(demands, budget).rows}
        assert rows, "work is left and nobody has a row"
        has_chunk = any(not live[name][1].is_decode for name in rows)
        for name, (job, demand) in list(live.items()):
            row = rows.get(name)
            if row is None:
                waited = demand.chunks_waited + 1 if demand.is_decode and has_chunk else demand.chunks_waited
                worst = max(worst, waited)
                live[name] = (job, replace(demand, chunks_waited=waited))
                continue
            service.serve(job.tenant, row.num_tokens, int(row.samples))
            left = demand.num_pending - row.num_tokens
            if row.samples:
                job.output -= 1
                left = 1
            if row.samples and job.output == 0:
                del live[name]
                service.leave(job.tenant)
            else:
                live[name] = (job, replace(demand, num_pending=left, last_step=step, chunks_waited=0))
        present = {job.tenant for job, _ in live.values()}
        for tenant in present:
            history[tenant].append(service.of(tenant))
    raise AssertionError(f"still running after 20,000 steps: {sorted(live)}")


@pytest.mark.parametrize("first_seed", range(0, 3000, 250))
def test_whole_runs_end_and_no_decode_waits_longer_than_configured(first_seed: int) -> None:
    longest = 0
    for seed in range(first_seed, first_seed + 250):
        rng = random.Random(seed)
        jobs = [
            Job(rng.choice("abc"), rng.randint(1, 40), rng.choice((1, 2, rng.randint(1, 150))), rng.randint(1, 20))
            for _ in range(rng.randint(1, 14))
        ]
        budget = StepBudget(rng.choice((4, 16, 32)), rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 3)))
        outcome = run(jobs, budget)
        assert outcome.worst_wait <= budget.max_decode_wait_chunks, seed
        longest = max(longest, outcome.worst_wait)
    assert longest >= 1  # or nothing ever waited, and the bound was not tried


def test_a_flood_of_one_tenant_does_not_slow_another() -> None:
    """Tenant a sends forty prompts at once, b one of the same length a little later: b is served at the pace of half the machine."""
    flood = [Job("a", 1, 100, 1) for _ in range(40)]
    alone = run([Job("b", 5, 100, 1)], StepBudget(20, 8)).steps
    jobs = [*flood, Job("b", 5, 100, 1)]
    service_of_b = run(jobs, StepBudget(20, 8)).service["b"]
    assert len(service_of_b) <= 2 * (alone - 5) + 2


def test_backlogged_tenants_stay_within_the_papers_bound() -> None:
    """Two tenants that always have work differ by at most twice the larger of a step's service and the longest prompt (theorem 4.4)."""
    rng = random.Random(7)
    jobs = [Job(tenant, 1, rng.randint(20, 60) * (3 if tenant == "a" else 1), 4) for tenant in "ab" for _ in range(30)]
    budget = StepBudget(24, 4)
    history = run(jobs, budget).service
    both = min(len(history["a"]), len(history["b"]))
    bound = 2 * max(COMPUTED_WEIGHT * 180, (COMPUTED_WEIGHT + SAMPLED_WEIGHT) * budget.max_step_tokens)
    gaps = [abs(a - b) for a, b in zip(history["a"][:both], history["b"][:both], strict=True)]
    assert max(gaps) <= bound
    assert max(gaps[5:]) > 0


def test_being_away_saves_nothing_up() -> None:
    service = TenantService()
    service.arrive("a")
    service.arrive("b")
    service.leave("b")
    service.serve("a", 500, 10)
    service.arrive("b")
    assert service.of("b") == service.of("a")


def test_coming_back_does_not_wipe_out_what_was_had() -> None:
    service = TenantService()
    service.arrive("a")
    service.arrive("b")
    service.serve("b", 300, 0)
    service.leave("b")
    service.arrive("b")
    assert service.of("b") - service.of("a") == 300


def test_salts_of_one_tenant_take_turns_as_one() -> None:
    service = TenantService()
    for namespace in ("a", "a/1", "a/2", "b"):
        service.arrive(namespace)
    service.serve("a/1", 10, 0)
    service.serve("a", 5, 0)
    assert service.of("a/2") == service.of("a") == 15 * COMPUTED_WEIGHT
    assert service.of("b") == 0
    for namespace in ("a/1", "a", "a/2"):
        service.leave(namespace)
    service.arrive("a/3")  # back, and no better off for another name
    assert service.of("a/3") == 15 * COMPUTED_WEIGHT
