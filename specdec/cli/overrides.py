"""Group choices that are no file: any model as `target=`, any class or plug-in as `drafter=`, `tree=`, `verifier=`.

Such a choice is registered with Hydra under a readable name, so that `--cfg`, sweeps and folder names work as for
a file. Choices that exist nowhere are refused here, with the nearest that does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from specdec.cli.sections import Component, TreeComponent, suggestion
from specdec.core import Registry
from specdec.evaluation.config import TargetConfig

_NODES: dict[str, Callable[[str], Any]] = {
    "target": lambda name: TargetConfig(name=name),
    "drafter": lambda name: Component(name=name),
    "tree": lambda name: TreeComponent(name=name),
    "verifier": lambda name: Component(name=name),
}
_PLAIN_GROUPS = ("sampling", "data", "engine", "eval", "logger", "pair", "experiment", "debug")
_CHOICE = re.compile(rf"({'|'.join((*_NODES, *_PLAIN_GROUPS))})(\.name)?=(.*)", re.DOTALL)
_OPEN_MAPPING = re.compile(
    r"((drafter|tree|verifier)\.args|tree\.max_nodes_by_batch|sampling\.logit_bias)[.=]"
)
_FLAGS_WITH_VALUE = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--config-dir",
    "-cd",
)
_SEARCH_PATH = re.compile(r"file://([^,\]]+)")


def prepare(arguments: Sequence[str]) -> list[str]:
    """Rewrites command-line arguments so that Hydra knows every group choice in them.

    Raises:
        ValueError: a choice that is neither a file, nor a model, nor a class.
    """
    folders = config_folders(arguments)
    return [_prepare(argument, folders) for argument in _flags_last(arguments)]


def config_folders(arguments: Sequence[str]) -> list[Path]:
    """Folders with configuration files: the user's, then our own."""
    folders: list[Path] = []
    for index, argument in enumerate(arguments):
        if argument in ("--config-dir", "-cd") and index + 1 < len(arguments):
            folders.append(Path(arguments[index + 1]))
        elif argument.startswith("--config-dir="):
            folders.append(Path(argument.partition("=")[2]))
        elif argument.startswith("hydra.searchpath="):
            folders += [Path(path) for path in _SEARCH_PATH.findall(argument)]
    return [*folders, Path(str(files("specdec.conf")))]


def options(group: str, folders: Sequence[Path]) -> dict[str, Path]:
    """Choices of a group that are files; a user's file hides ours of the same name."""
    found = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def packaged_targets(folders: Sequence[Path]) -> list[str]:
    """Names of the models that the choices of `target` stand for."""
    return [str(OmegaConf.load(path).name) for path in options("target", folders).values()]


def _flags_last(arguments: Sequence[str]) -> list[str]:
    """Hydra takes overrides in one piece; people put `-m` between them."""
    overrides: list[str] = []
    flags: list[str] = []
    for index, argument in enumerate(arguments):
        is_value = index > 0 and arguments[index - 1] in _FLAGS_WITH_VALUE
        (flags if is_value or argument.startswith("-") else overrides).append(argument)
    return overrides + flags


def _prepare(argument: str, folders: Sequence[Path]) -> str:
    if _OPEN_MAPPING.match(argument):
        # The files list some keys; what others there may be is for the class to say.
        return f"++{argument}"
    match = _CHOICE.fullmatch(argument)
    if match is None:
        return argument
    group, by_name, value = match.groups()
    if (by_name and group not in _NODES) or re.search(r"[(\[{'\"$]", value) or value in ("", "null"):
        return argument
    return f"{group}={','.join(_choice(group, name.strip(), folders) for name in value.split(','))}"


def _choice(group: str, name: str, folders: Sequence[Path]) -> str:
    known = options(group, folders)
    if name in known:
        return name
    if group not in _NODES:
        raise ValueError(f"unknown {group} {name!r}{suggestion(name, known)}; known: {', '.join(known)}")
    if group == "target":
        _check_target(name, [*known, *packaged_targets(folders)])
    else:
        _check_class(group, name)
    option = re.sub(r"[^\w.-]+", "_", name).strip("_.")
    ConfigStore.instance().store(group=group, name=option, node=asdict(_NODES[group](name)))
    return option


def _check_target(name: str, known: Sequence[str]) -> None:
    """Refuses what looks like a misspelled packaged model; other names are looked up when the model is loaded."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    if name not in known and nearest and "/" not in name and not Path(name).exists():
        raise ValueError(
            f"unknown target {name!r} (did you mean {nearest[0]!r}?); known: {', '.join(known)}, and any hub id, "
            "folder or GGUF file"
        )


def _check_class(group: str, name: str) -> None:
    # Imported here: most commands name files and need no registry.
    from specdec.drafters.registry import DRAFTERS, TREES
    from specdec.verifiers.registry import VERIFIERS

    registries: dict[str, Registry[Any]] = {"drafter": DRAFTERS, "tree": TREES, "verifier": VERIFIERS}
    registries[group].get(name)
