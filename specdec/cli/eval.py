"""`specdec eval`: one study, or a sweep of them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from specdec.cli import resolvers, sweep
from specdec.cli.convert import study_config
from specdec.cli.errors import explain
from specdec.cli.overrides import prepare
from specdec.evaluation.metrics import Metrics

__all__ = ["main", "resolvers"]


class _StudyFailed(SystemExit):
    """Carries the error of a single study past Hydra, which would print exceptions its own way."""

    def __init__(self, error: Exception) -> None:
        super().__init__(2)
        self.error = error


log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Runs `specdec eval` with these arguments."""
    application = hydra.main(version_base="1.3", config_path="pkg://specdec.conf", config_name="config")(job)
    with _as_command_line(prepare(arguments)), _raising_errors():
        try:
            application()
        except sweep.SweepFailed:
            return 1
        except _StudyFailed as failed:
            raise failed.error from None
    return 0


def job(config: DictConfig) -> float | None:
    """One study. In a sweep a failure is recorded and the other jobs go on.

    Returns:
        The speedup, for sweepers that optimise it; None without speculation, or of a failed job.
    """
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    in_sweep = hydra_config.mode is RunMode.MULTIRUN
    try:
        metrics = _run(config, folder, in_sweep)
    except Exception as error:
        log.exception("failed")
        if not in_sweep:
            raise _StudyFailed(error) from error
        sweep.record_failure(folder, error)
        print(f"failed: {folder.name}: {explain(error)}", file=sys.stderr)
        return None
    speedup = metrics.get("speedup", {}).get("total")
    return None if speedup is None else speedup["value"]


def _run(config: DictConfig, folder: Path, in_sweep: bool) -> Metrics:
    study = study_config(config)
    # Imported here: it imports torch and transformers, which wrong keys need not wait for.
    from transformers.utils import logging as transformers_logging

    from specdec.evaluation.study import run_study
    from specdec.evaluation.table import study_table

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    metrics = run_study(study, folder)
    if in_sweep:
        print(f"\n{folder.name}")
    study_table(metrics).print()
    print(f"results: {_shown(folder)}")
    return metrics


def _shown(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


@contextmanager
def _as_command_line(arguments: list[str]) -> Iterator[None]:
    """Hydra reads its arguments from `sys.argv`."""
    before, sys.argv = sys.argv, ["specdec eval", *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _raising_errors() -> Iterator[None]:
    """Hydra raises errors under this variable, where it would print them and exit."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
