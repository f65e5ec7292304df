"""Relay load, hit rates and requests in the system over simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pdd.sim.run import Report


def save_plot(reports: Mapping[str, Report], path: Path) -> None:
    """A column per report, PNG or SVG by the path's ending."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, len(reports), figsize=(4.2 * len(reports), 6), layout="constrained", sharey="row", squeeze=False)
    for column, (name, report) in enumerate(reports.items()):
        times = [sample.at_s / 60 for sample in report.samples]
        axes[0, column].plot(times, [sample.relay_load for sample in report.samples], color="#d1495b")
        axes[0, column].set_ylim(0, 1.05)
        axes[0, column].set_title(name, fontsize=9)
        axes[1, column].plot(times, [sample.prefill_hit for sample in report.samples], color="#c9a227", label="prefill")
        axes[1, column].plot(times, [sample.main_hit for sample in report.samples], color="#2e86ab", label="main")
        axes[1, column].legend(fontsize=8)
        axes[2, column].plot(times, [sample.num_running for sample in report.samples], color="#555555")
        axes[2, column].set_xlabel("minutes")
    for row, label in enumerate(("share of relay rows in use", "prefix hit rate", "requests in the system")):
        axes[row, 0].set_ylabel(label, fontsize=9)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
