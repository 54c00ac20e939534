"""What a sweep says when it is over. It reads the jobs' folders, so it works with launchers of other processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from specdec.cli.errors import explain
from specdec.evaluation.folder import FAILURE, METRICS, read_json, write_json


class SweepFailed(SystemExit):
    """Some jobs failed. Hydra turns exceptions of callbacks into warnings, unless they ask to exit."""

    def __init__(self) -> None:
        super().__init__(1)


class SweepSummary(Callback):
    """Prints one row a job of the sweep's folder, then the failures; leaves the rows as CSV and as a figure.

    Raises:
        SweepFailed: jobs failed, or left no result.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = sorted(path.parent.parent for path in folder.glob("*/.hydra/overrides.yaml"))
        if not jobs:
            return
        # Imported here: it imports torch, and Hydra creates this object for every command.
        from specdec.evaluation.sweep import write_sweep
        from specdec.evaluation.table import sweep_table

        names = job_names([_overrides(job) for job in jobs])
        metrics = [read_json(job / METRICS) if (job / METRICS).is_file() else None for job in jobs]
        print()
        sweep_table(list(zip(names, metrics, strict=True))).print()
        finished = [(name, found) for name, found in zip(names, metrics, strict=True) if found is not None]
        if finished:
            write_sweep(folder, finished)
        print(f"results: {folder}")
        failed = [(name, job) for name, job, found in zip(names, jobs, metrics, strict=True) if found is None]
        for name, job in failed:
            print(f"failed: {name}: {_reason(job)}", file=sys.stderr)
        if failed:
            raise SweepFailed


def record_failure(folder: Path, error: Exception) -> None:
    """Leaves the reason of a failure in a job's folder."""
    write_json(folder / FAILURE, {"error": explain(error)})


def job_names(overrides: Sequence[Sequence[str]]) -> list[str]:
    """What distinguishes each job: its overrides without those that all jobs share."""
    shared = set(overrides[0]).intersection(*overrides) if len(overrides) > 1 else set()
    return [" ".join(item for item in items if item not in shared) or "(defaults)" for items in overrides]


def _overrides(job: Path) -> list[str]:
    return [str(item) for item in OmegaConf.load(job / ".hydra" / "overrides.yaml")]


def _reason(job: Path) -> str:
    return read_json(job / FAILURE)["error"] if (job / FAILURE).is_file() else "it left no result"
