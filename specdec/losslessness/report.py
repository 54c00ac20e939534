"""What people and machines read of a check: tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from specdec.evaluation.provenance import environment
from specdec.evaluation.table import TextTable
from specdec.losslessness.cell import Cell
from specdec.losslessness.check import CheckReport
from specdec.losslessness.matrix import MatrixReport
from specdec.losslessness.power import Outcome
from specdec.losslessness.result import CheckResult, Verdict
from specdec.models.target import TargetModel


def check_table(report: CheckReport) -> TextTable:
    """One row a check, and the verdict."""
    rows = [[row.name, row.status.value, row.statistic, row.detail] for row in report.results]
    notes = [
        f"verdict: {report.verdict.text}",
        *(f"  {reason}" for reason in report.reasons),
        _alarms(report.config.alpha, report.threshold),
    ]
    columns = ["check", "result", "statistic", "detail"]
    return TextTable(title=_title(report), columns=columns, rows=rows, notes=notes, numeric=False)


def check_json(report: CheckReport, target: TargetModel) -> dict[str, Any]:
    """The whole report; numbers that JSON lacks become text."""
    return plain(
        {
            "combination": report.combination,
            "verdict": report.verdict.name.lower(),
            "exit_code": int(report.verdict),
            "reasons": list(report.reasons),
            "alpha": report.config.alpha,
            "threshold": report.threshold,
            "config": asdict(report.config),
            "checks": [result_json(result) for result in report.results],
            "seconds": report.seconds,
            "environment": environment(target),
        }
    )


def result_json(result: CheckResult) -> dict[str, Any]:
    """One check."""
    return {
        "name": result.name,
        "status": result.status.value,
        "statistic": result.statistic,
        "detail": result.detail,
        **result.data,
    }


def plain(value: Any) -> Any:
    """A value of mappings, sequences, numbers and texts alone."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)


def _alarms(alpha: float, threshold: float) -> str:
    return (
        f"False alarms: in at most {alpha:g} of all runs something exact fails; one test fails below "
        f"p = {threshold:.1g}."
    )


def _title(report: CheckReport) -> str:
    what = report.combination
    sampling = what["sampling"]
    warps = [
        f"{name} {sampling[name]:g}"
        for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        if sampling[name] != off
    ]
    drawn = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    return (
        f"{what['target']} ({what['dtype']}) · {what['drafter']} × {what['tree']} × {what['verifier']} · "
        f"{what['law']} · {' · '.join([drawn, *warps])} · {report.seconds:.0f} s"
    )


def matrix_table(report: MatrixReport) -> TextTable:
    """One row a verifier and law; lossy rules come last."""
    cells = sorted(report.cells, key=lambda cell: cell.lossy)
    notes = [
        f"verdict: {report.verdict.text}",
        *(f"  {reason}" for reason in report.reasons),
        *(f"  not covered: {reason}" for reason in report.skipped),
        f"{report.num_members} combinations, {report.num_samples} requests for each of two ways to draw; fewer for "
        "rules of temperature 0 or that reproduce plain decoding: these are compared with it token by token.",
        "together: one test over all combinations of the row. Lossy rules are measured on one combination a law.",
        _alarms(report.config.alpha, report.threshold),
    ]
    columns = ["verifier", "law", "combinations", "result", "worst p", "together", "controls caught"]
    title = f"every legal combination on {report.target.name} · {report.seconds:.0f} s"
    return TextTable(
        title=title, columns=columns, rows=[_cell_row(cell) for cell in cells], notes=notes, numeric=False
    )


def matrix_json(report: MatrixReport) -> dict[str, Any]:
    """The whole report."""
    return plain(
        {
            "verdict": report.verdict.name.lower(),
            "exit_code": int(report.verdict),
            "reasons": list(report.reasons),
            "alpha": report.config.alpha,
            "threshold": report.threshold,
            "config": asdict(report.config),
            "num_samples": report.num_samples,
            "not_covered": list(report.skipped),
            "cells": [_cell_json(cell) for cell in report.cells],
            "seconds": report.seconds,
            "environment": environment(report.target),
        }
    )


def _cell_row(cell: Cell) -> list[str]:
    pooled = min(cell.pooled().values(), key=lambda test: test.p_value)
    caught = [own.outcome for own in cell.controls].count(Outcome.CAUGHT)
    tried = [own for own in cell.controls if own.outcome in (Outcome.CAUGHT, Outcome.MISSED)]
    failed = sum(own.verdict is Verdict.NOT_EXACT for own in cell.reports)
    if cell.lossy:
        distance = next(
            r.data["distance"] for own in cell.reports for r in own.results if "distance" in r.data
        )
        result = f"lossy, distance {distance:.2f}"
    else:
        result = f"{failed} FAIL" if failed else "pass"
    return [
        cell.verifier,
        cell.law.value,
        str(len(cell.reports)),
        result,
        f"{cell.worst:.2g}",
        f"{pooled.p_value:.2g}",
        "" if cell.lossy else f"{caught} of {len(tried)}",
    ]


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {
        "verifier": cell.verifier,
        "law": cell.law.value,
        "lossy": cell.lossy,
        "worst_p_value": cell.worst,
        "pooled_p_values": {length: test.p_value for length, test in cell.pooled().items()},
        "controls": [{**asdict(own), "outcome": own.outcome.value} for own in cell.controls],
        "combinations": [
            {
                "name": own.name,
                "tree_args": dict(own.tree_args),
                "verdict": own.verdict.name.lower(),
                "reasons": list(own.reasons),
                "checks": [result_json(result) for result in own.results],
            }
            for own in cell.reports
        ],
    }
