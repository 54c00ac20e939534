"""The folder of a run: one process writes to it, finished results are never overwritten."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS = "metrics.json"
"""Written last: a folder that has it is finished."""
FAILURE = "failure.json"
CONFIG = "config.yaml"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Holds a folder for this process; the claim ends with the process, however it ends.

    Raises:
        ValueError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{folder} is in use by another run; choose another folder") from error
        yield


def finished_metrics(folder: Path, config: str) -> dict[str, Any] | None:
    """Metrics of a finished run of the same configuration; None if there is none.

    Args:
        folder: of the run.
        config: what `config.yaml` of that configuration says.

    Raises:
        ValueError: the folder holds results of another configuration.
    """
    path = folder / METRICS
    if not path.is_file():
        return None
    if (folder / CONFIG).read_text(encoding="utf-8") != config:
        raise ValueError(
            f"{folder} holds results of another configuration (see its {CONFIG}); choose another folder"
        )
    return read_json(path)


def read_json(path: Path) -> Any:
    """The value a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is there as a whole or not at all. NaN has no place in JSON and is refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
