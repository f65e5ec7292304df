"""A linear map whose weight is packed once, at load time, into the blocks that the CPU's matrix product wants."""

from __future__ import annotations

from typing import Final, Protocol

import torch
import torch.nn.functional as F

from pddbridge.weight_rounding import RoundedWeight
from pddkernels.native.torch_native import Native, PackedWeight

PLAIN: Final = "plain"
ONEDNN: Final = "onednn"
NATIVE: Final = "native"

# oneDNN chooses blocks by the number of rows it is told to expect. Blocks chosen for 64 are as fast for 1 to 256 rows as their own
# (measured), those chosen for one row are up to twice as slow for more.
_EXPECTED_ROWS = 64
# Its products of fewer rows read the same weights, but slower: 1 row takes up to 1.3 times as long as 4, 2 rows up to 1.6 times.
_MIN_ROWS = 4
# It makes code for every number of rows, for each size of weight: 0.65 MB, kept for good, and 1 to 2 ms (measured). So there are only so
# many numbers of rows between a power of two and the next, and rows are added.
_SIZES_PER_DOUBLING = 4


class Linear(Protocol):
    """``x`` [rows, in] -> [rows, out], of a weight [out, in] and a bias [out] or None, all in one dtype. ``path``: whose product it is."""

    @property
    def path(self) -> str: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def warm_up(self, most_rows: int) -> None:
        """Have all code made that ``x`` of up to so many rows needs. Linears of one path, sizes and dtype share it."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, native: Native | None, *, wide: bool = False) -> Linear:
    """The fastest path there is for ``weight``: native products where the processor has them, oneDNN's on another CPU, else PyTorch's.

    ``wide``: the output may be float32 where that costs nothing.
    """
    if native is not None and weight.dtype == torch.bfloat16 and native.can_pack(weight.shape[1]):
        return NativeLinear(native.pack(weight), bias, native, torch.float32 if wide else torch.bfloat16)
    return OneDnnLinear(weight, bias) if can_pack(weight.device, weight.dtype) else PlainLinear(weight, bias)


def make_int8_linear(weight: RoundedWeight, bias: torch.Tensor | None, native: Native, *, wide: bool = False) -> Linear:
    """For inputs in bfloat16. Raises ValueError for an odd number of them."""
    num_inputs = weight.steps.shape[1]
    if not (native.has_int8 and native.can_pack(num_inputs)):
        raise ValueError(f"compute_dtype: int8 cannot multiply {num_inputs} inputs here, allowed an even number on a CPU that has it")
    return NativeLinear(
        native.pack_int8(*(torch.from_numpy(values) for values in weight)), bias, native, torch.float32 if wide else torch.bfloat16
    )


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's prepacked linear for ``dtype``; TorchInductor relies on the same two operators."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def padded(rows: int) -> int:
    """Of how many rows oneDNN's product for ``rows`` is: up to a quarter more, 8 % on average, none for a power of two."""
    step = max(_MIN_ROWS, (1 << (rows - 1).bit_length()) // (2 * _SIZES_PER_DOUBLING))
    return -(-rows // step) * step


class PlainLinear:
    """See :class:`Linear`."""

    path = PLAIN

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def warm_up(self, most_rows: int) -> None:
        """No code is made."""


class OneDnnLinear:
    """See :class:`Linear`. Reads weights 1.3 to 2.2 times as fast as ``F.linear`` for 1 to 16 rows, float32 and bfloat16 alike."""

    path = ONEDNN

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._num_inputs, self._dtype = weight.shape[1], weight.dtype
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        more = padded(rows) - rows
        all_rows = F.pad(x, (0, 0, 0, more)) if more else x
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(all_rows, self._weight, self._bias, "none", [], "")
        return out[:rows]

    def warm_up(self, most_rows: int) -> None:
        for rows in sorted({padded(rows) for rows in range(1, most_rows + 1)}):
            self(torch.zeros(rows, self._num_inputs, dtype=self._dtype))


class NativeLinear:
    """See :class:`Linear`. Reads weights 1.35 to 1.6 times as fast as oneDNN for 1 to 16 rows of bfloat16, and is 8 % faster for 512."""

    path = NATIVE

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None, native: Native, dtype: torch.dtype) -> None:
        """``dtype``: of the output. Inputs are bfloat16."""
        self._packed = packed
        self._bias = None if bias is None else bias.float()
        self._native, self._dtype = native, dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._native.linear(x, self._packed, self._bias, self._dtype)

    def warm_up(self, most_rows: int) -> None:
        """Its code was compiled when it was loaded."""
