"""From exceptions to one line that says what to do."""

from __future__ import annotations

import re

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from specdec.cli.sections import unknown_key

USER_ERRORS = (ValueError, OSError, ImportError, HydraException, OmegaConfBaseException)
"""What wrong input raises; anything else is a bug and keeps its traceback."""

_UNKNOWN_KEY = re.compile(r"Could not override '([\w.@]+)'")


def explain(error: BaseException) -> str:
    """The error's message as one line."""
    text = str(error) or type(error).__name__
    unknown = _UNKNOWN_KEY.search(text)
    if isinstance(error, HydraException) and unknown:
        return unknown_key(unknown[1])
    if isinstance(error, HydraException) and error.__cause__ is not None:
        text = f"{text}: {error.__cause__}"
    return re.sub(r"\s*\n\s*", " ", text.strip())
