"""What the plans cost and what they give for it, and revenue over hit rates."""

from __future__ import annotations

from pathlib import Path

from pdd.plan.command import Answer

_NAMES = {"same_site": "one site", "cross_site": "across sites,\nno relay", "pdd": "PDD"}


def save_plot(found: Answer, path: Path) -> None:
    """PNG or SVG by the path's ending."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    shown = {kind: plan for kind, plan in found.plans.items() if plan is not None}
    for x, plan in enumerate(shown.values()):
        axes[0].bar(x, plan.cost_per_hour, color="#9aa5b1")
        axes[1].bar(x, plan.bcr, color="#2e86ab")
        axes[1].annotate(f"{plan.bcr:.0f}", (x, plan.bcr), ha="center", va="bottom", fontsize=8)
        for axis in axes[:2]:
            axis.set_xticks(range(len(shown)), [_NAMES[name] for name in shown], fontsize=8)
    axes[0].set_title("dollars an hour", fontsize=9)
    axes[1].set_title("good requests per dollar", fontsize=9)
    for curve, label, colour in ((found.joined, "tails joined", "#2e86ab"), (found.alone, "tails alone", "#d1495b")):
        axes[2].plot([100 * e.hit_rate for e in curve], [e.dollars_per_hour for e in curve], color=colour, label=label)
    axes[2].set_title("revenue of PDD's chips, dollars an hour", fontsize=9)
    axes[2].set_xlabel("prefix hit rate, %", fontsize=8)
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
