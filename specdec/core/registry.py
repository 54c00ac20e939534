"""Lazy registries: a name maps to `module:attribute`, imported on first use; plug-ins are entry points."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Named classes of one kind.

    Args:
        kind: singular noun for messages, such as "drafter".
        builtin: name to `"module:attribute"`.
        group: entry-point group scanned for plug-ins, such as "specdec.drafters".
    """

    def __init__(self, kind: str, builtin: Mapping[str, str], group: str) -> None:
        self.kind = kind
        self.group = group
        self._targets: dict[str, str] = dict(builtin)
        self._classes: dict[str, type[T]] = {}
        self._scanned = False

    def register(self, name: str, target: str | type[T]) -> None:
        """Adds a class, or the `"module:attribute"` it will be imported from.

        Raises:
            ValueError: the name is taken by something else.
        """
        if name in self._targets and self._targets[name] != target and self._classes.get(name) is not target:
            raise ValueError(
                f"{self.kind} name {name!r} is taken by {self._targets[name]}; choose another name"
            )
        if isinstance(target, str):
            self._targets[name] = target
        else:
            self._targets[name] = f"{target.__module__}:{target.__qualname__}"
            self._classes[name] = target

    def names(self) -> list[str]:
        """All known names, plug-ins included, sorted."""
        self._scan()
        return sorted(self._targets)

    def get(self, name: str) -> type[T]:
        """The class behind a name, or behind a `package.module:Class` path.

        Raises:
            ValueError: unknown name; the message lists the known ones and the nearest.
        """
        if name not in self._targets:
            self._scan()
        if name not in self._targets and ":" not in name:
            raise ValueError(self._unknown(name))
        if name not in self._classes:
            self._classes[name] = self._load(self._targets.get(name, name))
        return self._classes[name]

    def create(self, name: str, /, *args: Any, **kwargs: Any) -> T:
        """Calls the class behind a name.

        Raises:
            ValueError: unknown name, or arguments the class does not take; the message lists those it does.
        """
        return self._call(name, self.get(name), *args, **kwargs)

    def build(self, name: str, /, *args: Any, **kwargs: Any) -> T:
        """Calls the class's `build` method: as `create`, for classes that need a context."""
        return self._call(name, self.get(name).build, *args, **kwargs)  # type: ignore[attr-defined]

    def describe(self, name: str) -> str:
        """First line of the class docstring."""
        return (self.get(name).__doc__ or "").strip().split("\n")[0]

    def _call(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        signature = inspect.signature(function)
        passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        if passes_on:
            signature = inspect.signature(self.get(name))
        try:
            signature.bind(*([] if passes_on else args), **kwargs)
        except TypeError as error:
            known = ", ".join(list(signature.parameters)[0 if passes_on else len(args) :]) or "none"
            raise ValueError(f"{self.kind} {name!r}: {error}; its arguments are: {known}") from error
        return function(*args, **kwargs)

    def _scan(self) -> None:
        if self._scanned:
            return
        self._scanned = True
        for point in entry_points(group=self.group):
            self._targets.setdefault(point.name, point.value)

    def _load(self, target: str) -> type[T]:
        module_name, _, attribute = target.partition(":")
        try:
            loaded = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self.kind} {target!r} cannot be imported: {error}") from error
        return loaded

    def _unknown(self, name: str) -> str:
        names = self.names()
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        return f"unknown {self.kind} {name!r}{hint} Known: {', '.join(names)}"
