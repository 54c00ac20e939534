"""Names of run folders, as interpolations of the configuration.

They are registered on import, because the workers of a launcher import nothing but the job.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from datetime import datetime

from omegaconf import OmegaConf

_LONGEST_NAME = 160
_TELLING = ("experiment", "target", "drafter", "pair", "tree", "verifier", "sampling")


def unique_name() -> str:
    """A name no other process has: the time alone would be shared by runs of the same second."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(3)}"


def folder_name(overrides: Sequence[str]) -> str:
    """Overrides as the name of one folder, the most telling first; a long name is cut and ends with its hash."""
    whole = ",".join(sorted((item.lstrip("+") for item in overrides), key=_telling_first))
    name = re.sub(r"[^\w.,=+@-]+", "_", whole).strip("_") or "default"
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _telling_first(override: str) -> tuple[int, str]:
    group = re.split(r"[.=]", override, maxsplit=1)[0]
    return _TELLING.index(group) if group in _TELLING else len(_TELLING), override


# Cached: the folder of a run keeps its name however often the configuration is read.
OmegaConf.register_new_resolver("specdec_unique", unique_name, use_cache=True, replace=True)
OmegaConf.register_new_resolver("specdec_folder_name", folder_name, replace=True)
