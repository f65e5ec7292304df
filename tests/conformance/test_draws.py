"""Drawing on a device, of each engine, against the host's sampler. The devices here are CPUs."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import pddjax.draw
import pddtorch.draw
from pddbridge.draw_plan import HOST_EXP_ERROR, DrawArrays, weight_error
from pddbridge.sampling_params import SamplingParams
from tests.conformance.draw_suite import (
    Drawer,
    Rows,
    check_borders,
    check_bounds_hold_for_a_worse_host,
    check_real_vocabulary,
    check_rows,
    row_sets,
)


@cache
def compiled(vocab_size: int, num_rows: int) -> jax.stages.Compiled:
    """For any parameters: compiled once per shape."""
    shape = jax.ShapeDtypeStruct
    rows = {name: shape((num_rows,), np.float32) for name in DrawArrays._fields}
    rows |= {name: shape((num_rows,), np.int32) for name in ("top_k", "top_p_low", "top_p_high", "u")} | {
        "drawn": shape((num_rows,), np.bool_)
    }
    logits, highest, ids = shape((vocab_size, num_rows), np.float32), shape((num_rows,), np.float32), shape((num_rows,), np.int32)
    with jax.enable_x64(True):
        return jax.jit(pddjax.draw.draw).lower(logits, highest, ids, DrawArrays(**rows)).compile()


def draw_with_jax(logits: np.ndarray, plan: DrawArrays) -> tuple[np.ndarray, np.ndarray]:
    ids, margins = compiled(logits.shape[1], len(logits))(
        np.ascontiguousarray(logits.T), logits.max(1), np.full(len(logits), 7, np.int32), plan
    )
    return np.asarray(ids), np.asarray(margins)


@torch.inference_mode()
def draw_with_torch(logits: np.ndarray, plan: DrawArrays) -> tuple[np.ndarray, np.ndarray]:
    values = torch.from_numpy(logits)
    ids, margins = pddtorch.draw.draw(values, values.amax(1), torch.full((len(logits),), 7), plan)
    return ids.numpy(), margins.numpy()


@cache
def drawer_of(name: str) -> Drawer:
    if name == "jax":
        return Drawer(draw_with_jax, pddjax.draw.measured_error(jax.devices("cpu")[0]))
    return Drawer(draw_with_torch, pddtorch.draw.measured_error(torch.device("cpu")))


@pytest.fixture(params=["jax", "torch"])
def drawer(request: pytest.FixtureRequest) -> Drawer:
    return drawer_of(str(request.param))


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_a_token_that_is_sure_is_the_hosts(name: str) -> None:
    @given(row_sets())
    @settings(max_examples=150, deadline=None)
    def check(rows: Rows) -> None:
        check_rows(drawer_of(name), rows)

    check()


def test_what_lies_at_a_border_is_in_doubt(drawer: Drawer) -> None:
    check_borders(drawer)


def test_a_real_vocabulary_leaves_little_doubt(drawer: Drawer) -> None:
    check_real_vocabulary(drawer, num_batches=6)


def test_the_bounds_cover_a_host_with_a_worse_exp(drawer: Drawer, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = np.exp

    def exp_is_wrong(error: float) -> None:
        def wrong(x: np.ndarray, out: np.ndarray) -> np.ndarray:
            weights: np.ndarray = exact(x.astype(np.float64))
            weights[: len(x) // 2] *= 1 + error
            weights[len(x) // 2 :] *= 1 - error
            weights[x == 0] = 1.0  # as any exp has it
            out[...] = weights
            return out

        monkeypatch.setattr("pddbridge.sampling.np.exp", wrong)

    check_bounds_hold_for_a_worse_host(drawer, exp_is_wrong, num_batches=4)


def test_torch_draws_many_rows_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(9)
    rows = [(random.normal(0, 3, 300).astype(np.float32), SamplingParams(seed=i, max_tokens=1, top_p=0.9)) for i in range(7)]
    monkeypatch.setattr(pddtorch.draw, "_MOST_LOGITS", 2 * 300 + 1)
    assert check_rows(drawer_of("torch"), rows, range(7)) == 0


def test_rows_that_are_not_drawn_keep_their_ids(drawer: Drawer) -> None:
    plan = DrawArrays(
        drawn=np.zeros(4, np.bool_),
        temperature=np.ones(4, np.float32),
        top_k=np.full(4, 3, np.int32),
        top_p_low=np.full(4, 1 << 30, np.int32),
        top_p_high=np.full(4, 1 << 30, np.int32),
        order_tolerance=np.zeros(4, np.float32),
        min_p_sure=np.full(4, np.inf, np.float32),
        min_p_possible=np.full(4, np.inf, np.float32),
        u=np.zeros(4, np.int32),
    )
    ids, _ = drawer.draw(np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), plan)
    assert ids.tolist() == [7] * 4


def test_the_hosts_exp_is_as_good_as_the_bounds_say() -> None:
    quotients = np.random.default_rng(1).uniform(-87, 0, 1 << 20).astype(np.float32)
    exact = np.exp(quotients.astype(np.float64))
    assert np.abs(np.exp(quotients) / exact - 1).max() <= HOST_EXP_ERROR


def test_a_devices_error_is_measured_and_a_weight_that_is_not_1_refused() -> None:
    def weights(wrong: float) -> float:
        return weight_error(lambda gap, temperature: np.where(gap == 0, 1.0, np.exp(-(gap / temperature).astype(np.float64)) * (1 + wrong)))

    assert weights(1e-4) == pytest.approx(2e-4, rel=1e-3)
    with pytest.raises(ValueError, match="gap of 0"):
        weight_error(lambda gap, temperature: np.full(len(gap), 0.99))
