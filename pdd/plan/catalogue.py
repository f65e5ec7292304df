"""Chips and models that plans are made of, each figure with its source and the date it was read. Facts, no decisions."""

from __future__ import annotations

from dataclasses import dataclass

from pddkernels.targets.hardware import CHIPS


@dataclass(frozen=True)
class PlanChip:
    """Peaks of one chip. ``flops_s``: dense bfloat16 · ``interconnect_bytes_s``: to its neighbours, both ways together, None: not
    published in one figure · ``price_per_hour``: US dollars on demand (lowest, highest seen), None: no public price seen.
    """

    name: str
    flops_s: float
    memory_bytes: float
    bytes_s: float
    interconnect_bytes_s: float | None
    price_per_hour: tuple[float, float] | None
    source: str
    read_on: str

    @property
    def mid_price(self) -> float:
        """Raises ValueError where no price is known."""
        if self.price_per_hour is None:
            raise ValueError(f"chip {self.name}: no public price is known, give one with --price")
        return sum(self.price_per_hour) / 2


_READ = "2026-11-30"
_PRICES = "price: public on-demand lists of several clouds, range seen"


def _known(name: str, hardware: str, interconnect_gb_s: float | None, price: tuple[float, float] | None) -> PlanChip:
    chip = CHIPS[hardware]
    interconnect = None if interconnect_gb_s is None else interconnect_gb_s * 1e9
    return PlanChip(name, chip.flops_s, chip.memory_bytes, chip.bytes_s, interconnect, price, f"{chip.source}; {_PRICES}", chip.read_on)


CHIP_CATALOGUE: dict[str, PlanChip] = {
    chip.name: chip
    for chip in (
        _known("a100", "A100 SXM 80GB", 600, (1.2, 1.8)),
        _known("h100", "H100 SXM", 900, (2.5, 3.5)),
        _known("h200", "H200 SXM", 900, (3.2, 6.0)),
        _known("l40s", "L40S", 64, (0.8, 1.2)),
        _known("mi300x", "MI300X", 896, (1.5, 6.0)),
        _known("tpu-v5e", "TPU v5e", 400, (1.2, 1.2)),
        _known("tpu-v5p", "TPU v5p", 1200, (4.2, 4.2)),
        _known("tpu-v6e", "TPU v6e", 800, (2.7, 2.7)),
        PlanChip("h20", 148e12, 96e9, 4.0e12, 900e9, None, "NVIDIA H20 as listed by server vendors", _READ),
        PlanChip("trainium2", 667e12, 96e9, 2.9e12, 1280e9, None, "AWS Trainium2 architecture pages", _READ),
    )
}


@dataclass(frozen=True)
class PlanModel:
    """``active_params``: that a token passes, ``total_params``: that stand in memory · ``kv_bytes_per_token``: bfloat16 ·
    ``pair_flops``: of attention per pair of tokens, all layers.
    """

    name: str
    active_params: float
    total_params: float
    bytes_per_param: float
    kv_bytes_per_token: float
    pair_flops: float
    source: str


MODEL_CATALOGUE: dict[str, PlanModel] = {
    model.name: model
    for model in (
        PlanModel("llama-3.1-8b", 8.0e9, 8.0e9, 2, 131_072, 4 * 32 * 32 * 128, "config.json of meta-llama/Llama-3.1-8B"),
        PlanModel("llama-3.1-70b", 70.6e9, 70.6e9, 2, 327_680, 4 * 80 * 64 * 128, "config.json of meta-llama/Llama-3.1-70B"),
        PlanModel("qwen3-32b", 32.8e9, 32.8e9, 2, 262_144, 4 * 64 * 64 * 128, "config.json of Qwen/Qwen3-32B"),
        PlanModel(
            "deepseek-v3",
            37e9,
            671e9,
            1,
            70_272,
            2 * 61 * 128 * (192 + 128),
            "config.json and report of deepseek-ai/DeepSeek-V3, FP8 weights",
        ),
        # A class, not a model: what has been published of the scheme (80 requests of 64K: 23 GB at 10 % miss) fits 48,068 bytes per token.
        PlanModel(
            "1t-class", 32e9, 1.0e12, 1, 48_068, 2 * 61 * 64 * (192 + 128), "published range of 1T-class models: 10-80 KB of KV per token"
        ),
    )
}


def chip(name: str) -> PlanChip:
    """Raises ValueError for a name that is not in the catalogue."""
    if name not in CHIP_CATALOGUE:
        raise ValueError(f"chip: given {name!r}, allowed {sorted(CHIP_CATALOGUE)}")
    return CHIP_CATALOGUE[name]


def model(name: str) -> PlanModel:
    """Raises ValueError for a name that is not in the catalogue."""
    if name not in MODEL_CATALOGUE:
        raise ValueError(f"model: given {name!r}, allowed {sorted(MODEL_CATALOGUE)}")
    return MODEL_CATALOGUE[name]
