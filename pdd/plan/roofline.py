"""What a group of chips takes for a model's steps, by its peaks and stated shares of them. No measurement: an estimate that says so."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdd.plan.catalogue import PlanChip, PlanModel
from pdd.sim.costs import EngineCost


@dataclass(frozen=True)
class Efficiency:
    """Shares of a chip's peaks that engines reach. Defaults: what public benchmarks of tuned engines show for large models
    (prefill 40-60 % of the matrix rate, decode 60-80 % of the memory rate). ``step_s``: fixed cost of a step · ``spare_memory``: kept free.
    """

    prefill_flops: float = 0.5
    decode_flops: float = 0.3
    memory: float = 0.7
    step_s: float = 0.003
    spare_memory: float = 0.1


def engine_cost(chip: PlanChip, num_chips: int, model: PlanModel, efficiency: Efficiency) -> EngineCost:
    """Of one worker that splits the model over ``num_chips`` chips. A decode step reads all weights: with tens of rows nearly every expert
    of a mixture is somebody's.
    """
    flops_s = num_chips * chip.flops_s
    prefill_flops_s, decode_flops_s = flops_s * efficiency.prefill_flops, flops_s * efficiency.decode_flops
    bytes_s = num_chips * chip.bytes_s * efficiency.memory
    token_flops = 2 * model.active_params
    return EngineCost(
        prefill_s=efficiency.step_s,
        prefill_token_s=token_flops / prefill_flops_s,
        prefill_pair_s=model.pair_flops / prefill_flops_s,
        step_s=efficiency.step_s + model.total_params * model.bytes_per_param / bytes_s,
        row_s=token_flops / decode_flops_s,
        context_s=model.kv_bytes_per_token / bytes_s,
        extend_token_s=token_flops / decode_flops_s,
    )


def kv_tokens(chip: PlanChip, num_chips: int, model: PlanModel, efficiency: Efficiency) -> int:
    """Tokens whose KV fits beside the weights; 0 when not even they fit."""
    free = num_chips * chip.memory_bytes * (1 - efficiency.spare_memory) - model.total_params * model.bytes_per_param
    return max(0, int(free / model.kv_bytes_per_token))


def chips_needed(chip: PlanChip, model: PlanModel, efficiency: Efficiency, context_tokens: int) -> int:
    """The smallest power of two whose memory holds the model and one request."""
    need = model.total_params * model.bytes_per_param + context_tokens * model.kv_bytes_per_token
    least = need / (chip.memory_bytes * (1 - efficiency.spare_memory))
    return 1 << max(0, math.ceil(math.log2(max(1.0, least))))
