"""Overrides to a study, for commands that are no Hydra application of their own."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_module

from specdec.cli.convert import study_config
from specdec.cli.overrides import prepare
from specdec.evaluation.config import StudyConfig


def compose_study(overrides: Sequence[str], defaults: Sequence[str] = ()) -> StudyConfig:
    """The study that overrides describe, in the groups of `specdec eval`.

    Args:
        overrides: such as `drafter=ngram`, `sampling.top_k=5`.
        defaults: overrides that hold where the others don't set the same key.

    Raises:
        ValueError: a key or a choice that doesn't exist.
    """
    set_by_user = {override.partition("=")[0].lstrip("+~") for override in overrides}
    own = [default for default in defaults if default.partition("=")[0] not in set_by_user]
    with initialize_config_module(version_base="1.3", config_module="specdec.conf"):
        composed = compose(config_name="config", overrides=[*own, *prepare(overrides)])
    return study_config(composed)
