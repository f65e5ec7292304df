"""The step planner: budget, order, fairness."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdd.worker.scheduler import PlannedRow, RowDemand, StepBudget, plan_step


def decode(order: int, last_step: int = 0) -> RowDemand:
    return RowDemand(f"r{order}", order, 1, True, last_step)


def chunk(order: int, pending: int, samples: bool = False, last_step: int = 0) -> RowDemand:
    return RowDemand(f"r{order}", order, pending, samples, last_step)


def test_decode_rows_come_first_and_the_rest_of_the_budget_goes_to_a_chunk() -> None:
    plan = plan_step([chunk(1, 500), decode(2), decode(3)], StepBudget(64, 8))
    assert plan.rows == (PlannedRow("r2", 1, True), PlannedRow("r3", 1, True), PlannedRow("r1", 62, False))


def test_a_long_prompt_does_not_block_a_short_one() -> None:
    plan = plan_step([chunk(1, 5000), chunk(2, 10, samples=True)], StepBudget(64, 8))
    assert plan.rows == (PlannedRow("r1", 54, False), PlannedRow("r2", 10, True))


def test_short_prompts_do_not_block_the_oldest_long_one() -> None:
    rows = plan_step([chunk(1, 5000), *(chunk(n, 40) for n in range(2, 7))], StepBudget(64, 8)).rows
    assert rows[0] == PlannedRow("r1", 32, False)
    assert sum(row.num_tokens for row in rows) == 64


def test_a_row_samples_only_when_it_reaches_the_end() -> None:
    assert plan_step([chunk(1, 65, samples=True)], StepBudget(64, 8)).rows == (PlannedRow("r1", 64, False),)
    assert plan_step([chunk(1, 64, samples=True)], StepBudget(64, 8)).rows == (PlannedRow("r1", 64, True),)
    assert plan_step([chunk(1, 64)], StepBudget(64, 8)).rows == (PlannedRow("r1", 64, False),)


def test_more_decode_rows_than_fit_take_turns() -> None:
    rows = plan_step([decode(1, 7), decode(2, 5), decode(3, 6)], StepBudget(64, 2)).rows
    assert [row.request_id for row in rows] == ["r2", "r3"]


def test_full_decode_rows_leave_one_row_for_a_waiting_prompt() -> None:
    rows = plan_step([*(decode(n) for n in range(1, 9)), chunk(9, 30)], StepBudget(64, 8)).rows
    assert len(rows) == 8
    assert rows[-1] == PlannedRow("r9", 30, False)


def test_a_single_row_is_shared_in_turns() -> None:
    budget = StepBudget(4, 1)
    assert plan_step([decode(1, 3), chunk(2, 9, last_step=2)], budget).rows == (PlannedRow("r2", 4, False),)
    assert plan_step([decode(1, 3), chunk(2, 9, last_step=4)], budget).rows == (PlannedRow("r1", 1, True),)


demands = st.lists(
    st.builds(lambda p, s, last: (p, s, last), st.integers(1, 80), st.booleans(), st.integers(0, 5)), min_size=1, max_size=12
).map(lambda items: [RowDemand(f"r{i}", i, p, s, last) for i, (p, s, last) in enumerate(items)])


@given(demands, st.integers(1, 64), st.integers(1, 8))
def test_every_plan_keeps_the_budget_and_wastes_nothing(items: list[RowDemand], max_tokens: int, max_rows: int) -> None:
    by_id = {d.request_id: d for d in items}
    rows = plan_step(items, StepBudget(max_tokens, max_rows)).rows
    assert 1 <= len(rows) <= max_rows
    assert len({row.request_id for row in rows}) == len(rows)
    total = sum(row.num_tokens for row in rows)
    assert total <= max_tokens
    for row in rows:
        demand = by_id[row.request_id]
        assert 1 <= row.num_tokens <= demand.num_pending
        assert row.samples == (demand.samples and row.num_tokens == demand.num_pending)
    if len(rows) < min(max_rows, len(items)):
        assert total == max_tokens  # a row is left out only for want of tokens


@given(demands, st.integers(2, 16), st.integers(1, 4))
def test_everyone_finishes(items: list[RowDemand], max_tokens: int, max_rows: int) -> None:
    left = {d.request_id: d for d in items}
    for step in range(1, 2000):
        if not left:
            return
        for row in plan_step(list(left.values()), StepBudget(max_tokens, max_rows)).rows:
            demand = left.pop(row.request_id)
            if demand.num_pending > row.num_tokens:
                left[row.request_id] = RowDemand(demand.request_id, demand.order, demand.num_pending - row.num_tokens, demand.samples, step)
    raise AssertionError(f"still waiting after 2,000 steps: {sorted(left)}")
