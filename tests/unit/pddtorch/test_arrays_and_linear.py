from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F

from pddtorch import linear as linear_module
from pddtorch.arrays import to_numpy, to_torch
from pddtorch.linear import ONEDNN, PLAIN, make_linear, padded


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays_keep_every_bit(dtype: type[np.generic]) -> None:
    """All 16-bit patterns, NaN payloads included; and memory is shared, both ways."""
    array = np.arange(2**16, dtype=np.uint16).view(np.float16 if dtype is np.float32 else dtype).astype(dtype)
    tensor = to_torch(array)
    back = to_numpy(tensor)
    assert back.dtype == array.dtype
    assert np.array_equal(back.view(np.uint8), array.view(np.uint8))
    back[:] = 1
    assert float(tensor[5]) == 1
    assert float(array[5]) == 1


def test_a_read_only_array_is_copied_without_a_warning() -> None:
    array = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = to_torch(array)
    tensor[0] = 9
    assert array[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_packed_product_is_the_plain_one(dtype: torch.dtype, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 40, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    linear = make_linear(weight, bias, None)
    assert linear.path == ONEDNN
    for rows in (1, 2, 7, 65):
        x = torch.randn(rows, 40, generator=generator).to(dtype)
        want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        with torch.inference_mode():
            torch.testing.assert_close(linear(x).double(), want, atol=tolerance, rtol=tolerance)


def test_products_are_of_few_numbers_of_rows_and_not_many_more_than_asked_for() -> None:
    for rows in range(1, 5000):
        assert rows <= padded(rows) <= max(rows + 3, rows * 1.25)
    assert all(padded(1 << bits) == 1 << bits for bits in range(2, 13))
    assert len({padded(rows) for rows in range(1, 257)}) == 20
    assert len({padded(rows) for rows in range(1, 4097)}) == 36


def test_no_memory_is_taken_after_the_warm_up_whatever_the_number_of_rows() -> None:
    """oneDNN's code for one more number of rows is 0.1 MB and more, even for a matrix as small as this."""
    linear = make_linear(torch.randn(192, 128), None, None)
    assert linear.path == ONEDNN
    with torch.inference_mode():
        linear.warm_up(160)
        linear.warm_up(160)
        before = psutil.Process().memory_info().rss
        for rows in range(1, 161):
            linear(torch.zeros(rows, 128))
        assert psutil.Process().memory_info().rss - before < 2**22


def test_without_onednn_the_plain_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "can_pack", lambda device, dtype: False)
    weight = torch.eye(3) * 2
    linear = make_linear(weight, None, None)
    assert linear.path == PLAIN
    assert linear(torch.ones(1, 3)).tolist() == [[2.0, 2.0, 2.0]]
