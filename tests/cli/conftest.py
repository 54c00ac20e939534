"""A working folder with a tiny target and a few prompts, and the command line in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from specdec_tests.commands import STUDY
from specdec_tests.folders import save_prompts, save_target

from specdec.cli import main


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    save_target(folder / "target")
    save_prompts(folder / "prompts.jsonl")
    return folder


@pytest.fixture
def workspace(template, tmp_path, monkeypatch) -> Path:
    """The working directory; it has `target/` and `prompts.jsonl`."""
    (tmp_path / "target").symlink_to(template / "target")
    (tmp_path / "prompts.jsonl").symlink_to(template / "prompts.jsonl")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    GlobalHydra.instance().clear()


@pytest.fixture
def study(workspace) -> Callable[..., int]:
    """Runs `specdec eval` on the tiny target."""
    return lambda *arguments: main(["eval", *STUDY, *arguments])
