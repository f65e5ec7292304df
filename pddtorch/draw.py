"""Drawing a batch of tokens on the device: what :mod:`pddbridge.draw_plan` asks, by one sort and running sums."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from pddbridge.draw_plan import ONE, ORDER_ROUNDING, DrawArrays, scale_bits, weight_error
from pddkernels.torch_ops import to_device

# Logits at a time: a dozen arrays of 8 bytes each stand beside them.
_MOST_LOGITS: Final = 1 << 23


def draw(logits: torch.Tensor, highest: torch.Tensor, ids: torch.Tensor, plan: DrawArrays) -> tuple[torch.Tensor, torch.Tensor]:
    """Of float32 ``logits`` [S, vocab] with maxima ``highest`` [S], at ``ids`` [S] i64: the drawn ids, those given where nothing is drawn,
    [S] i64; and the margins [S] f32. Waits for nothing.
    """
    num_rows = max(1, _MOST_LOGITS // logits.shape[1])
    parts = [slice(first, first + num_rows) for first in range(0, len(logits), num_rows)]
    drawn = [_draw(logits[part], highest[part], ids[part], DrawArrays(*(values[part] for values in plan))) for part in parts]
    return torch.cat([ids for ids, _ in drawn]), torch.cat([margins for _, margins in drawn])


def _draw(logits: torch.Tensor, highest: torch.Tensor, ids: torch.Tensor, plan: DrawArrays) -> tuple[torch.Tensor, torch.Tensor]:
    vocab_size = logits.shape[1]
    told = {name: to_device(values, logits.device) for name, values in plan._asdict().items()}
    column = {name: values[:, None] for name, values in told.items()}
    gap = highest[:, None] - logits
    weights = (weights_of(gap, column["temperature"]) * 2.0 ** scale_bits(vocab_size)).long()
    surely, perhaps = gap <= column["min_p_sure"], gap <= column["min_p_possible"]
    if (plan.top_k < vocab_size).any() or (plan.top_p_low < ONE).any():
        # Both zeros are one, whose lowest ids come first.
        order = (logits + 0.0).argsort(dim=1, descending=True, stable=True)
        places = torch.arange(vocab_size, device=logits.device).expand_as(order)
        place = torch.empty_like(order).scatter_(1, order, places)
        in_nucleus, near_nucleus = _nucleus(logits, gap, weights, order, place, column)
        surely, perhaps = surely & in_nucleus, perhaps & near_nucleus

    sure = torch.where(surely, weights, 0)
    unsure = torch.where(perhaps & ~surely, weights, 0)
    cumulative, cumulative_unsure = sure.cumsum(1), unsure.cumsum(1)
    total, total_unsure = cumulative[:, -1], cumulative_unsure[:, -1]
    u = told["u"].long()
    target = _share(u, total)
    token = (cumulative <= target[:, None]).sum(1).clamp_(max=vocab_size - 1)
    up_to, unsure_up_to, own, own_unsure = (
        values.gather(1, token[:, None])[:, 0] for values in (cumulative, cumulative_unsure, sure, unsure)
    )
    below = target - (up_to - own) - _share(ONE - u, unsure_up_to - own_unsure)
    above = up_to - target - _share(u, total_unsure - unsure_up_to)
    margins = torch.minimum(below, above).float() / (total + total_unsure).float()
    return torch.where(told["drawn"], token, ids), margins


def weights_of(gap: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float64 exp of the host's float32 quotient, 1 where ``gap`` is 0."""
    return torch.exp(-(gap / temperature).double())


def measured_error(device: torch.device) -> float:
    """:func:`pddbridge.draw_plan.weight_error` of ``device``."""

    def weights(gap: np.ndarray, temperature: np.ndarray) -> np.ndarray:
        return weights_of(to_device(gap, device), to_device(temperature, device)).cpu().numpy()

    return weight_error(weights)


def _nucleus(
    logits: torch.Tensor,
    gap: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    place: torch.Tensor,
    column: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What top-k and top-p surely and perhaps keep, bool [S, vocab]. ``order``: ids by falling logits · ``place``: where in it an id is."""
    kept = place < column["top_k"]
    cumulative = torch.where(kept, weights, 0).gather(1, order).cumsum(1)
    total, has_nucleus = cumulative[:, -1:], column["top_p_low"] < ONE
    borders = []
    for share in ("top_p_low", "top_p_high"):
        last = (cumulative < _share(column[share].long(), total).clamp(min=1)).sum(1, keepdim=True).clamp_(max=logits.shape[1] - 1)
        border = order.gather(1, last)
        border_gap = gap.gather(1, border)
        tolerance = column["order_tolerance"] + ORDER_ROUNDING * border_gap
        near = kept & (logits != logits.gather(1, border)) & ((gap - border_gap).abs() <= tolerance)
        borders.append((place <= last, border_gap, tolerance, near.any(1, keepdim=True)))
    (within, low_gap, low_tolerance, low_confused), (up_to, high_gap, high_tolerance, high_confused) = borders
    surely = within & ~(low_confused & (gap >= low_gap - low_tolerance))
    perhaps = up_to | (high_confused & (gap <= high_gap + high_tolerance))
    return kept & (surely | ~has_nucleus), kept & (perhaps | ~has_nucleus)


def _share(share: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """``share / ONE * total`` of int64, ``total`` in [0, 2**62], rounded down by less than 2."""
    return (((total >> 32) * share) << 2) + (((total & 0xFFFFFFFF) * share) >> 30)
