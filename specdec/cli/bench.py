"""`specdec bench`: times the engine's parts inside one run, so that all ratios share one machine state."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.evaluation.table import TextTable


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
    verify = commands.add_parser("verify", help="verification rules, by law and tree size, beside a step")
    verify.add_argument("--target", default="smollm2-135m", help="as in `specdec eval target=`")
    verify.add_argument("--dtype", default=None, help="as in `specdec eval target.dtype=`")
    verify.add_argument("--batch", type=_positive, default=8, help="requests (default 8)")
    verify.add_argument(
        "--nodes", type=_positive, nargs="+", default=[8, 16, 32, 64], help="tree sizes, roots included"
    )
    verify.add_argument("--temperature", type=float, default=1.0, help="of p (default 1)")
    verify.add_argument("--top-p", type=float, default=1.0, help="of p (default 1: off)")
    verify.add_argument("--context", type=_positive, default=100, help="tokens of context (default 100)")
    verify.add_argument("--repeats", type=_positive, default=7, help="measurements of each row (default 7)")
    verify.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(arguments)
    if not sys.stderr.isatty():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    result, table = _RUNS[options.command](options)
    table.print()
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _step(options: argparse.Namespace) -> tuple[dict[str, Any], TextTable]:
    from specdec.evaluation.step_bench import bench_step, step_table

    result = bench_step(
        options.target,
        dtype=options.dtype,
        context=options.context,
        repeats=options.repeats,
        compare=options.compare,
    )
    return result, step_table(result)


def _verify(options: argparse.Namespace) -> tuple[dict[str, Any], TextTable]:
    from specdec.core import SamplingParams
    from specdec.evaluation.verify_bench import bench_verify, verify_table

    result = bench_verify(
        options.target,
        dtype=options.dtype,
        batch=options.batch,
        node_counts=options.nodes,
        params=SamplingParams(temperature=options.temperature, top_p=options.top_p),
        context=options.context,
        repeats=options.repeats,
    )
    return result, verify_table(result)


_RUNS = {"step": _step, "verify": _verify}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected an integer >= 1")
    return value
