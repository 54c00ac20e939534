"""`specdec bench`: times the engine's parts inside one run, so that all ratios share one machine state."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Runs `specdec bench` with these arguments."""
    parser = argparse.ArgumentParser(prog="specdec bench", description="Times the engine's parts.")
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="decode steps against their weight-streaming linears alone")
    step.add_argument("--target", default="smollm2-135m", help="as in `specdec eval target=`")
    step.add_argument("--dtype", default=None, help="as in `specdec eval target.dtype=`")
    step.add_argument("--context", type=_positive, default=300, help="tokens of context (default 300)")
    step.add_argument("--repeats", type=_positive, default=30, help="measurements of each row (default 30)")
    step.add_argument(
        "--compare", choices=["transformers"], help="also time transformers on the same weights"
    )
    step.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(arguments)
    if not sys.stderr.isatty():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    from specdec.evaluation.step_bench import bench_step, step_table

    result = bench_step(
        options.target,
        dtype=options.dtype,
        context=options.context,
        repeats=options.repeats,
        compare=options.compare,
    )
    step_table(result).print()
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer >= 1")
    return value
