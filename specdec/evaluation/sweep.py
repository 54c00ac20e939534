"""What a sweep leaves behind: one table as CSV and one figure, a row a job."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specdec.evaluation.metrics import Metrics

CSV, FIGURE = "sweep.csv", "sweep.png"
_RUN = ("target", "drafter", "tree", "verifier", "temperature", "batch_size", "num_prompts")
_COLOUR, _PLAIN = "#3b6ea8", "#888888"

Job = tuple[str, Metrics]
"""The overrides that distinguish a job, and its metrics."""


def write_sweep(folder: Path, jobs: Sequence[Job]) -> None:
    """Writes `sweep.csv` and `sweep.png` for the finished jobs."""
    rows = [_row(name, metrics) for name, metrics in jobs]
    with (folder / CSV).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    FigureCanvasAgg(sweep_figure(jobs)).print_png(folder / FIGURE)


def sweep_figure(jobs: Sequence[Job]) -> Figure:
    """Acceptance length and speedup of each job with their intervals."""
    figure = Figure(figsize=(10, 1.2 + 0.24 * len(jobs)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    lines = range(len(jobs))
    for axes, label, estimates in (
        (left, "τ (tokens a step)", [_measured(metrics)["acceptance"]["length"] for _, metrics in jobs]),
        (right, "speedup over plain decoding", [_speedup(metrics) for _, metrics in jobs]),
    ):
        for line, estimate in zip(lines, estimates, strict=True):
            if estimate is None:
                continue
            axes.plot(estimate["value"], line, "o", color=_COLOUR, markersize=4)
            if estimate["low"] is not None:
                axes.hlines(line, estimate["low"], estimate["high"], color=_COLOUR, linewidth=1.5)
        axes.axvline(1, color=_PLAIN, linestyle=":", linewidth=1)
        axes.grid(axis="y", alpha=0.2)
        axes.set(xlabel=label)
    left.set_yticks(lines, [name for name, _ in jobs], fontsize=8)
    left.invert_yaxis()
    return figure


def _row(name: str, metrics: Metrics) -> dict[str, Any]:
    measured = _measured(metrics)
    row: dict[str, Any] = {"job": name, **{key: metrics["run"][key] for key in _RUN}}
    for column, estimate in (
        ("tau", measured["acceptance"]["length"]),
        ("acceptance_rate", measured["acceptance"]["rate"]),
        ("tokens_per_second", measured["tokens_per_second"]),
        ("plain_tokens_per_second", metrics["plain"]["tokens_per_second"]),
        ("speedup", _speedup(metrics)),
    ):
        for part in ("value", "low", "high"):
            key = column if part == "value" else f"{column}_{part}"
            row[key] = "" if estimate is None or estimate[part] is None else round(estimate[part], 4)
    return row


def _measured(metrics: Metrics) -> Metrics:
    measured: Metrics = metrics["speculative" if "speculative" in metrics else "plain"]
    return measured


def _speedup(metrics: Metrics) -> dict[str, Any] | None:
    total: dict[str, Any] | None = metrics["speedup"]["total"] if "speedup" in metrics else None
    return total
