"""Weights & Biases: one run a study, offline unless asked otherwise, always finished, failures marked as such."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from specdec.evaluation.config import StudyConfig
from specdec.evaluation.metrics import Metrics
from specdec.evaluation.plots import SPEEDUP, SURVIVAL


class Tracker(Protocol):
    """Takes the numbers of a study."""

    def log(self, metrics: Metrics) -> None: ...


@contextmanager
def tracked(config: StudyConfig, folder: Path) -> Iterator[Tracker]:
    """The tracker that the configuration names; finished on exit, as failed after an exception."""
    if config.logger.name == "none":
        yield _NoTracker()
        return
    tracker = _WandbTracker(config, folder)
    try:
        yield tracker
    except BaseException:
        tracker.finish(exit_code=1)
        raise
    tracker.finish(exit_code=0)


class _NoTracker:
    def log(self, metrics: Metrics) -> None:
        """Keeps nothing."""


class _WandbTracker:
    def __init__(self, config: StudyConfig, folder: Path) -> None:
        import wandb

        self._wandb = wandb
        self._folder = folder
        logger = config.logger
        self._run = wandb.init(
            dir=folder,
            mode=logger.mode,  # type: ignore[arg-type]
            project=logger.project,
            entity=logger.entity,
            group=logger.group,
            tags=logger.tags,
            name=config.label,
            job_type="eval",
            config=asdict(config),
            # A study runs in a process that may run others: each has its own run.
            reinit="finish_previous",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, metrics: Metrics) -> None:
        """Writes the scalars to the summary, survival as a table, and the plots."""
        self._run.summary.update(dict(_flatten(metrics)))
        if "speculative" in metrics:
            acceptance = metrics["speculative"]["acceptance"]
            rows = [
                [k, *rates]
                for k, rates in enumerate(
                    zip(acceptance["survival"], acceptance["conditional"], strict=True), start=1
                )
            ]
            table = self._wandb.Table(columns=["position", "survival", "conditional"], data=rows)
            plots = {
                Path(name).stem: self._wandb.Image(str(self._folder / name)) for name in (SPEEDUP, SURVIVAL)
            }
            self._run.log({"acceptance_by_position": table, **plots})

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Scalars under `/`-separated names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", value
