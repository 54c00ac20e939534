"""One tiny target and one finished study of it, for all tests of the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from specdec_tests.folders import make_study, save_prompts, save_target

from specdec.engine.config import SpeculativeConfig
from specdec.evaluation.config import StudyConfig
from specdec.evaluation.study import run_study

NGRAM = SpeculativeConfig(drafter="ngram", tree="best_first", tree_args={"num_nodes": 6})


class Finished(NamedTuple):
    config: StudyConfig
    folder: Path
    metrics: dict[str, Any]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    save_target(folder / "target")
    save_prompts(folder / "prompts.jsonl")
    return folder


@pytest.fixture(scope="session")
def study(workspace) -> Callable[..., StudyConfig]:
    return lambda speculative=NGRAM, **changes: make_study(workspace, speculative, **changes)


@pytest.fixture(scope="session")
def finished(workspace, study) -> Finished:
    config = study()
    folder = workspace / "finished"
    return Finished(config, folder, run_study(config, folder))
