"""What is asked of a plan: traffic, service objectives, prices. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from pdd.sim.workload import StatedHits


@dataclass(frozen=True)
class Objectives:
    """A good request has its first token within ``ttft_s`` and the others within ``tpot_s`` each on average; ``share`` of all must be."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9

    def __post_init__(self) -> None:
        for name, seconds in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if seconds <= 0:
                raise ValueError(f"{name}: given {seconds:g}, allowed above 0")
        if not 0 < self.share <= 1:
            raise ValueError(f"share: given {self.share:g}, allowed above 0 up to 1")


@dataclass(frozen=True)
class Prices:
    """US dollars. ``per_chip_hour`` by name of chip · ``per_gbit_hour``: of the line between the sites; the default is that of a 10 Gbit/s
    wave at 3,000 dollars a month · ``input_per_million``, ``output_per_million``: tokens sold; ``cached_share``: of the input price, for
    input that hits a cache (published: 10-25 %).
    """

    per_chip_hour: dict[str, float]
    per_gbit_hour: float = 3000.0 / 730 / 10
    input_per_million: float = 0.6
    output_per_million: float = 2.5
    cached_share: float = 0.1


@dataclass(frozen=True)
class Means:
    """Of one request: tokens."""

    prompt: float
    miss: float
    output: float

    @property
    def context(self) -> float:
        """That a decode row reads per step, on average over its answer."""
        return self.prompt + self.output / 2


def means(traffic: StatedHits) -> Means:
    """Expected values of the workload."""
    singular = traffic.singular_share
    output = traffic.output.median * 2.718281828459045 ** (traffic.output.sigma**2 / 2)
    hit = traffic.mean_hit if traffic.high_share < 1 else traffic.high_hit
    return Means(
        prompt=traffic.prompt_tokens,
        miss=traffic.prompt_tokens * (singular + (1 - singular) * (1 - hit)),
        output=singular * traffic.singular_output_tokens + (1 - singular) * output,
    )
