"""The command line: `specdec <command>`. Commands are imported when they are called, so that help is instant."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand."""

    module: str
    """Has `main(arguments) -> exit code`."""
    summary: str


COMMANDS = {
    "eval": Command(
        "specdec.cli.eval", "measure speculative decoding against plain decoding (Hydra, sweeps)"
    ),
    "check": Command("specdec.cli.check", "tell whether a combination is exact, with its own controls"),
    "generate": Command(
        "specdec.cli.generate", "complete a prompt in the terminal, coloured by token origin"
    ),
    "ls": Command("specdec.cli.listing", "list drafters, trees, verifiers, targets and experiments"),
    "bench": Command("specdec.cli.bench", "time the engine's parts: `specdec bench step`"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        Exit code: 0 done, 1 jobs of a sweep failed or a combination is not exact, 2 wrong usage, 3 a check had
        too little power, 130 interrupted.
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"specdec {version('specdec-lab')}")
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(COMMANDS)}"
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    # `drafter=my_file:MyModel` finds a file beside the user. Last, so that no folder hides an installed package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return _run(COMMANDS[name], rest)


def usage() -> str:
    """What `specdec --help` prints."""
    lines = [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: specdec <command> [arguments]",
            "",
            "A research framework for speculative decoding.",
            "",
            *lines,
            "",
            "specdec <command> --help says more; specdec --version prints the version.",
        ]
    )


def _run(command: Command, arguments: list[str]) -> int:
    # The exceptions are imported late: they cost time that help does not need.
    run: Callable[[list[str]], int] = import_module(command.module).main
    from specdec.cli.errors import USER_ERRORS, explain

    full_errors = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        return run(arguments)
    except USER_ERRORS as error:
        if full_errors:
            raise
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
