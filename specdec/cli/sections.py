"""The sections of the configuration, and what to say about a key that none of them has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from specdec.core import SamplingParams
from specdec.data import DataConfig
from specdec.engine.config import EngineConfig
from specdec.evaluation.config import LoggerConfig, MeasurementConfig, TargetConfig


@dataclass(frozen=True, kw_only=True)
class Component:
    """A drafter or a verifier: a registered name, or `package.module:Class`, and the arguments of its class."""

    name: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TreeComponent(Component):
    """A tree proposer, with the caps of `SpeculativeConfig`."""

    max_nodes_by_batch: Mapping[int, int] = field(default_factory=dict)
    max_batch_nodes: int | None = None


SECTIONS: dict[str, type] = {
    "target": TargetConfig,
    "drafter": Component,
    "tree": TreeComponent,
    "verifier": Component,
    "sampling": SamplingParams,
    "data": DataConfig,
    "engine": EngineConfig,
    "eval": MeasurementConfig,
    "logger": LoggerConfig,
}


def known_keys(section: str) -> list[str]:
    """Keys of a section, of the whole configuration for ""; nothing for a section that doesn't exist."""
    if not section:
        return list(SECTIONS)
    return list(get_type_hints(SECTIONS[section])) if section in SECTIONS else []


def unknown_key(key: str) -> str:
    """Says that a configuration key doesn't exist, with the nearest that does."""
    section, _, name = key.rpartition(".")
    known = known_keys(section)
    if not known:
        return unknown_key(section) if section else f"unknown configuration key {key!r}"
    where = f"in {section!r}" if section else "at the top level"
    return f"unknown configuration key {key!r}{suggestion(name, known)}; known {where}: {', '.join(known)}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing if no known name is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
