"""The tables people read: one study, and the jobs of a sweep. Rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from specdec.evaluation.metrics import Metrics

NOT_AVAILABLE = "n/a"
# Plain steps differ by a few per cent on a quiet machine.
_UNSTEADY = 2


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    numeric: bool = True
    """Columns after the first are numbers, aligned to the right."""

    def print(self, stream: TextIO | None = None) -> None:
        """Prints to a stream, standard output if None."""
        stream = stream or sys.stdout
        if not stream.isatty():
            stream.write(self.plain())
            return
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index and self.numeric else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console = Console(file=stream, highlight=False)
        console.print(table)
        for note in self.notes:
            console.print(note, style="dim", markup=False)

    def plain(self) -> str:
        """Aligned text without colours or borders."""
        lines = [list(self.columns), *(list(row) for row in self.rows)]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        aligned = [
            "  ".join(
                cell.rjust(width) if index and self.numeric else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        rule = "-" * max(len(line) for line in aligned)
        return "\n".join([self.title, "", aligned[0], rule, *aligned[1:], *self.notes]) + "\n"


def study_table(metrics: Metrics) -> TextTable:
    """The numbers of one study, a column a variant."""
    variants = [metrics[name] for name in ("plain", "speculative") if name in metrics]
    rows: list[list[str]] = []

    def add(name: str, text: Callable[[Metrics], str]) -> None:
        rows.append([name, *(text(variant) for variant in variants)])

    add("tokens/s", lambda v: interval(v["tokens_per_second"], "{:.1f}"))
    if "speedup" in metrics:
        rows.append(["speedup", "1", interval(metrics["speedup"]["total"], "{:.2f}", "×")])
        rows.append(["speedup without prefill", "1", interval(metrics["speedup"]["decode"], "{:.2f}", "×")])
    add("τ (tokens a step)", lambda v: interval(v["acceptance"]["length"], "{:.2f}"))
    add("acceptance rate", lambda v: interval(v["acceptance"]["rate"], "{:.1%}"))
    add("survival@k", lambda v: series(v["acceptance"]["survival"]))
    add("conditional@k", lambda v: series(v["acceptance"]["conditional"]))
    if any(len(variant["acceptance"]["by_rank"]) > 1 for variant in variants):
        add("acceptance by sibling rank", lambda v: series(v["acceptance"]["by_rank"]))
    add("TTFT p50 / p95", lambda v: f"{_ms(v['ttft']['p50'])} / {_ms(v['ttft']['p95'])} ms")
    add("ITL p50 / p95", lambda v: f"{_ms(v['itl']['p50'])} / {_ms(v['itl']['p95'])} ms")
    for name, label in _SHARES.items():
        rows.append([label, *(_share(variant["time_shares"], name) for variant in variants)])
    add("K/V in use at the peak", lambda v: _mib(v["memory"]["peak_bytes"]))
    add("K/V pool, target + drafter", lambda v: _pool(v["memory"]))
    if "equality" in metrics:
        rows.append(["outputs equal to plain", "", equality_text(metrics["equality"])])
    columns = ["", *(name for name in ("plain", "speculative") if name in metrics)]
    return TextTable(title=title(metrics["run"]), columns=columns, rows=rows, notes=_notes(metrics))


def sweep_table(jobs: Sequence[tuple[str, Metrics | None]]) -> TextTable:
    """One row a job: its overrides and its metrics, None for a job that failed."""
    rows = [
        [name, *(_sweep_row(metrics) if metrics else ["failed", "", "", "", ""])] for name, metrics in jobs
    ]
    columns = ["overrides", "speedup", "tokens/s", "τ", "acceptance", "equal to plain"]
    return TextTable(title=f"{len(jobs)} jobs", columns=columns, rows=rows)


def title(run: Metrics) -> str:
    """What was measured, in one line."""
    how = "plain decoding"
    if run["drafter"]:
        how = f"{run['drafter']} × {run['tree']} × {run['verifier']}{' (lossy)' if run['lossy'] else ''}"
    prompts = f"{run['num_prompts']} {run['data']} prompts"
    sampling = "greedy" if run["temperature"] == 0 else f"temperature {run['temperature']:g}"
    return (
        f"{run['target']} ({run['dtype']}, {run['device']}) · {how} · {prompts} · batch {run['batch_size']} · "
        f"{sampling}"
    )


def interval(estimate: dict[str, Any] | None, form: str, unit: str = "") -> str:
    """A value with its interval, such as `2.10× [1.95, 2.26]`."""
    if estimate is None:
        return NOT_AVAILABLE
    text = form.format(estimate["value"]) + unit
    if estimate["low"] is None:
        return text
    return f"{text} [{form.format(estimate['low'])}, {form.format(estimate['high'])}]"


def series(values: Sequence[float | None]) -> str:
    """Rates by position."""
    texts = [NOT_AVAILABLE if value is None else f"{value:.2f}" for value in values]
    return " ".join(texts) or NOT_AVAILABLE


def equality_text(equality: Metrics) -> str:
    """Such as `19 of 20, 1 tie, 0 bugs`."""
    if not equality["applicable"]:
        return "not applicable"
    total = sum(count for name, count in equality.items() if name != "applicable")
    parts = [f"{equality['identical']} of {total}", f"ties {equality['tie']}", f"bugs {equality['bug']}"]
    parts += [f"{name} {equality[name]}" for name in ("different", "failed") if equality[name]]
    return ", ".join(parts)


_SHARES = {
    "draft": "time: draft",
    "forward": "time: target forward",
    "sampling": "time: sampling, verification",
    "bookkeeping": "time: bookkeeping",
}


def _notes(metrics: Metrics) -> list[str]:
    run = metrics["run"]
    unit = "prompts" if run["batch_size"] == 1 else f"batches of {run['batch_size']} prompts"
    notes = [f"[low, high]: {run['confidence']:.0%} bootstrap interval over {unit}."]
    itl = metrics["plain"]["itl"]
    if itl["p50"] and itl["p95"] > _UNSTEADY * itl["p50"]:
        notes.append(
            f"Plain decoding's p95 is {itl['p95'] / itl['p50']:.1f} × its p50: the machine was busy, and no "
            "interval covers that; repeat the run before believing its speeds."
        )
    equality = metrics.get("equality", {"applicable": True})
    if not equality["applicable"]:
        notes.append("Equality is not applicable: this rule keeps the distribution, not each token.")
        if run["lossy"]:
            notes[-1] = (
                "Equality is not applicable: this rule is lossy, it changes the distribution on purpose."
            )
    return notes


def _value(estimate: Metrics | None, form: str) -> str:
    return NOT_AVAILABLE if estimate is None else form.format(estimate["value"])


def _sweep_row(metrics: Metrics) -> list[str]:
    measured: Metrics = metrics["speculative" if "speculative" in metrics else "plain"]
    return [
        interval(metrics["speedup"]["total"], "{:.2f}", "×") if "speedup" in metrics else NOT_AVAILABLE,
        interval(measured["tokens_per_second"], "{:.1f}"),
        _value(measured["acceptance"]["length"], "{:.2f}"),
        _value(measured["acceptance"]["rate"], "{:.1%}"),
        equality_text(metrics["equality"]) if "equality" in metrics else NOT_AVAILABLE,
    ]


def _ms(seconds: float | None) -> str:
    return NOT_AVAILABLE if seconds is None else f"{1000 * seconds:.1f}"


def _share(shares: dict[str, float] | None, name: str) -> str:
    return NOT_AVAILABLE if shares is None else f"{shares[name]:.1%}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _pool(memory: Metrics) -> str:
    target, drafter = memory["target_pool_bytes"] / 2**20, memory["drafter_pool_bytes"] / 2**20
    return f"{target:.0f} + {drafter:.0f} MiB"
