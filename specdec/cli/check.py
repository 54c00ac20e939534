"""`specdec check`: is a combination of target, drafter, tree, verifier and sampling exact?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.compose import compose_study
from specdec.evaluation.config import StudyConfig

if TYPE_CHECKING:
    from specdec.losslessness.cell import Cell
    from specdec.losslessness.check import CheckConfig

EPILOG = """examples:
  specdec check drafter=ngram tree=best_first verifier=target_only
  specdec check target=tiny drafter=early_exit tree=chain_sampled verifier=my_file:MyVerifier
  specdec check --all

Overrides are those of `specdec eval`. Unless set, sampling=temperature (temperature 1), target.dtype=float32 and
data.limit=3; of each prompt only the start is used. Exactness belongs to the algorithm: in 16-bit types rounding of
the logits can hide it or imitate its absence. target=tiny is a random model built in code.

exit codes: 0 exact, 1 not exact, or lossy by declaration, 2 wrong usage, 3 too little power to say."""

DEFAULTS = ("logger=none", "sampling=temperature", "target.dtype=float32", "data.limit=3")
# Retrieval drafters need something to retrieve: a prompt's start, then the first of it again.
_START, _AGAIN = 12, 6
_MOST_WORKERS = 2


def main(arguments: list[str]) -> int:
    """Runs `specdec check` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="specdec check",
        description="Tells whether a combination is exact.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="group=choice|key=value")
    parser.add_argument("--all", action="store_true", help="every legal combination, on a tiny random target")
    parser.add_argument("--budget", type=float, help="seconds, roughly (default 120, with --all 240)")
    parser.add_argument(
        "--alpha", type=float, default=1e-3, help="false-alarm rate of the run (default 0.001)"
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed of the sampled requests (default 0)")
    parser.add_argument("--json", type=Path, help="write the whole report to this file")
    options = parser.parse_intermixed_args(arguments)
    if options.all and options.overrides:
        parser.error(f"--all chooses the combinations itself; leave out {' '.join(options.overrides)}")
    return _check_all(options) if options.all else _check_one(options)


def _check_all(options: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    from specdec.losslessness.matrix import check_all
    from specdec.losslessness.report import matrix_json, matrix_table

    _use_one_thread()
    with tqdm(unit=" combinations", disable=None, leave=False) as bar:

        def show(cell: Cell) -> None:
            bar.set_postfix_str(f"{cell.verifier}, {cell.law.value}")
            bar.update(len(cell.reports))

        report = check_all(_config(options, budget=240.0), workers=_MOST_WORKERS, progress=show)
    matrix_table(report).print()
    _write(options.json, matrix_json(report))
    return int(report.verdict)


def _check_one(options: argparse.Namespace) -> int:
    study = _compose(options.overrides)
    if study.speculative is None:
        raise ValueError("drafter=none decodes plainly: there is nothing to check; choose a drafter")
    _quiet()
    from specdec.losslessness.check import check
    from specdec.losslessness.report import check_json, check_table

    config = _config(options, budget=120.0)
    target, prompts = _target_and_prompts(study)
    report = check(target, study.speculative, study.sampling, prompts, config)
    check_table(report).print()
    _write(options.json, check_json(report, target))
    return int(report.verdict)


def _config(options: argparse.Namespace, budget: float) -> CheckConfig:
    from specdec.losslessness.check import CheckConfig

    chosen = budget if options.budget is None else options.budget
    return CheckConfig(budget=chosen, alpha=options.alpha, seed=options.seed)


def _compose(overrides: Sequence[str]) -> StudyConfig:
    # A name that no model has: it is not looked up.
    return compose_study(["target.name=tiny" if o == "target=tiny" else o for o in overrides], DEFAULTS)


def _target_and_prompts(study: StudyConfig) -> tuple[Any, list[list[int]]]:
    from specdec.data import load_prompts, render_prompts
    from specdec.evaluation.study import load
    from specdec.losslessness import tiny

    if study.target.name == tiny.NAME:
        _use_one_thread()
        return tiny.tiny_target(), [list(prompt) for prompt in tiny.PROMPTS]
    prompts = load_prompts(study.data)
    target, tokenizer = load(study)
    tokens = [prompt.token_ids for prompt in render_prompts(prompts, tokenizer, study.data.chat)]
    return target, [ids[:_START] + ids[:_AGAIN] for ids in tokens]


def _use_one_thread() -> None:
    """For tiny models: a second thread would only wait for the first."""
    import torch

    torch.set_num_threads(1)


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _quiet() -> None:
    if not sys.stderr.isatty():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
