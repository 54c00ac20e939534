"""The two plots of a study: speedup with its interval, survival by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specdec.evaluation.metrics import Metrics
from specdec.evaluation.variant import Variant

SPEEDUP = "speedup.png"
SURVIVAL = "survival.png"
_BLUE, _ORANGE, _GREY = "#3b6ea8", "#d9822b", "#888888"


def write_plots(folder: Path, metrics: Metrics, variants: Sequence[Variant]) -> None:
    """Writes the plots; without speculation there is nothing to plot."""
    if "speculative" not in metrics:
        return
    _save(speedup_figure(metrics, *variants), folder / SPEEDUP)
    _save(survival_figure(metrics), folder / SURVIVAL)


def speedup_figure(metrics: Metrics, plain: Variant, speculative: Variant) -> Figure:
    """Speedup of each batch, sorted, and of all of them with its interval."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    pairs = zip(plain.batches, speculative.batches, strict=True)
    ratios = sorted(
        (other.num_tokens / other.seconds) / (base.num_tokens / base.seconds)
        for base, other in pairs
        if base.num_tokens and other.num_tokens
    )
    axes.plot(range(1, len(ratios) + 1), ratios, "o", color=_BLUE, markersize=4, label="each batch")
    total = metrics["speedup"]["total"]
    if total is not None:
        axes.axhline(total["value"], color=_ORANGE, label=f"all: {total['value']:.2f}×")
        if total["low"] is not None:
            axes.axhspan(total["low"], total["high"], color=_ORANGE, alpha=0.2, linewidth=0)
    axes.axhline(1, color=_GREY, linestyle=":", linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="prompt or batch, sorted", ylabel="speedup over plain decoding", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def survival_figure(metrics: Metrics) -> Figure:
    """P(accept >= k) over all steps, and P(accept k) where k was reached and proposed."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    acceptance = metrics["speculative"]["acceptance"]
    depths = np.arange(1, len(acceptance["survival"]) + 1)
    conditional = [np.nan if rate is None else rate for rate in acceptance["conditional"]]
    axes.plot(depths, acceptance["survival"], "o-", color=_BLUE, label="survival: P(accept ≥ k)")
    axes.plot(depths, conditional, "s--", color=_ORANGE, label="conditional: P(accept k | k − 1 accepted)")
    axes.set(xlabel="position k in the draft", ylabel="probability", ylim=(0, 1.02), xticks=depths)
    axes.legend(frameon=False)
    return figure


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_png(path)
