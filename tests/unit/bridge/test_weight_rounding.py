"""Weights in int8: against the same in Python's own fractions, where they are exact."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddbridge.weight_rounding import round_per_output

finite = st.floats(-(2.0**60), 2.0**60, width=32)


@given(st.lists(finite, min_size=1, max_size=9))
def test_a_weight_is_off_by_half_a_step_at_most_and_the_largest_has_all_steps(row: list[float]) -> None:
    weight = np.array([row], np.float32)
    steps, scales = round_per_output(weight)
    assert (steps.dtype, scales.dtype, steps.shape, scales.shape) == (np.int8, np.float32, weight.shape, (1,))
    scale = Fraction(float(scales[0]))
    for step, value in zip(steps[0].tolist(), weight[0].tolist(), strict=True):
        # Half a step, and what float32 loses in a quotient of up to 127.
        assert abs(step * scale - Fraction(value)) <= scale / 2 * (1 + Fraction(1, 2**15))
    if max(map(abs, row)) > 1e-30:
        assert np.abs(steps).max() == 127


def test_ties_are_to_even_signs_are_symmetric_and_zeros_stay_zeros() -> None:
    weight = np.array([[127, 0.5, 1.5, 2.5, 126.5], [-127, -0.5, -1.5, -2.5, -126.5], [0, 0, 0, 0, 0]], np.float32)
    steps, scales = round_per_output(weight)
    assert steps.tolist() == [[127, 0, 2, 2, 126], [-127, 0, -2, -2, -126], [0] * 5]
    assert scales.tolist() == [1, 1, np.finfo(np.float32).tiny]


def test_outputs_are_rounded_one_by_one_whatever_the_stored_dtype() -> None:
    weight = np.random.default_rng(0).standard_normal((7, 33)).astype(ml_dtypes.bfloat16)
    whole = round_per_output(weight)
    for output in range(7):
        alone = round_per_output(weight[output : output + 1].astype(np.float32) * 2.0**output)
        assert np.array_equal(alone.steps[0], whole.steps[output])
        assert alone.scales[0] == whole.scales[output] * 2.0**output


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused_by_its_output(value: float) -> None:
    weight = np.ones((3, 4), np.float32)
    weight[1, 2] = value
    with pytest.raises(ValueError, match="compute_dtype: int8: weights of output 1 are not finite"):
        round_per_output(weight)
