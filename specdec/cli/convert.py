"""From composed configuration to frozen dataclasses: nothing behind this file sees a `DictConfig`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from specdec.cli.sections import SECTIONS, known_keys, unknown_key
from specdec.engine.config import SpeculativeConfig
from specdec.evaluation.config import StudyConfig

T = TypeVar("T")


def study_config(config: DictConfig) -> StudyConfig:
    """The study that a composed configuration describes.

    Raises:
        ValueError: a key that doesn't exist, a value of another type, a value that is missing or out of range.
    """
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = str(error).rpartition(": ")[2].split()[0]
        raise ValueError(f"{key} has no value; set {key}=...") from error
    assert isinstance(values, dict)
    built = {str(name): build_section(str(name), value) for name, value in values.items()}
    drafter, tree, verifier = built.pop("drafter"), built.pop("tree"), built.pop("verifier")
    speculative = None
    if drafter.name is not None:
        speculative = SpeculativeConfig(
            drafter=drafter.name,
            drafter_args=drafter.args,
            tree=tree.name,
            tree_args=tree.args,
            verifier=verifier.name,
            verifier_args=verifier.args,
            max_nodes_by_batch=tree.max_nodes_by_batch,
            max_batch_nodes=tree.max_batch_nodes,
        )
    return StudyConfig(measurement=built.pop("eval"), speculative=speculative, **built)


def build_section(section: str, values: Any) -> Any:
    """One section as its dataclass."""
    if section not in SECTIONS:
        raise ValueError(unknown_key(section))
    if not isinstance(values, dict):
        raise ValueError(f"{section}={values!r}: expected keys {', '.join(known_keys(section))}")
    return build(SECTIONS[section], values, section)


def build(cls: type[T], values: Mapping[str, Any], section: str) -> T:
    """A dataclass from plain values, checked against its annotations."""
    hints = get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise ValueError(unknown_key(f"{section}.{name}"))
        if not _fits(value, hints[name]):
            raise ValueError(f"{section}.{name}={value!r}: expected {_spelled(hints[name])}")
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return cls(**arguments)


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        # True == 1, so types are compared too.
        return any(value == option and type(value) is type(option) for option in get_args(hint))
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if origin is not None:
        key, item = get_args(hint)
        return isinstance(value, dict) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint


def _spelled(hint: Any) -> str:
    origin = get_origin(hint)
    if hint is types.NoneType:
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(_spelled(option) for option in get_args(hint))
    if origin is Literal:
        return " or ".join(repr(option) for option in get_args(hint))
    if origin is tuple:
        return f"a list of {_spelled(get_args(hint)[0])}"
    return "a mapping" if origin is not None else hint.__name__
