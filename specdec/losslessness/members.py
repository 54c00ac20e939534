"""Every legal combination of what is registered, sized for a tiny target; plug-ins are in the registries too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from specdec.core import ProposalLaw, Registry
from specdec.drafters.base import Drafter, TreeProposer, laws_of
from specdec.drafters.registry import DRAFTERS, TREES
from specdec.engine.config import SpeculativeConfig
from specdec.losslessness.tiny import VOCAB_SIZE, tiny_draft
from specdec.verifiers.registry import VERIFIERS

# Arguments by name: whichever a tree takes. They make trees of about six nodes.
_SMALL: Mapping[str, Any] = {
    "num_tokens": 3,
    "num_nodes": 6,
    "max_depth": 3,
    "depth": 3,
    "top_k": 3,
    "branching": 3,
    "sizes": (3, 1),
    "paths": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)),
}
# Ways to draw children, where a tree has the argument.
_VARIANTS: Sequence[Mapping[str, Any]] = (
    {},
    {"sample": True},
    {"sample": True, "min_confidence": 0.3},
    {"coupled": True},
    {"draw": "with_replacement"},
    {"draw": "without_replacement"},
)
# Arguments of the rules that can't do without.
_VERIFIER_ARGS: Mapping[str, Mapping[str, Any]] = {"synthetic": {"tau": 2.0}}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One legal combination."""

    config: SpeculativeConfig
    law: ProposalLaw
    tree: str
    """The tree and what distinguishes it from others of its name; empty where the drafter has none."""

    @property
    def name(self) -> str:
        return " × ".join(part for part in (self.config.drafter, self.tree, self.config.verifier) if part)


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree with arguments."""

    label: str
    name: str
    args: Mapping[str, Any]
    proposer: TreeProposer


def members(skipped: list[str]) -> Iterator[Member]:
    """All legal combinations. What can't be built, and so isn't covered, is added to `skipped` with the reason."""
    known_trees = list(trees(skipped))
    verifiers = dict(_usable(VERIFIERS, _VERIFIER_ARGS, skipped))
    arguments = _drafter_args()
    for drafter, cls in _classes(DRAFTERS, skipped):
        config = SpeculativeConfig(drafter=drafter, drafter_args=arguments.get(drafter, {}))
        for verifier, built in verifiers.items():
            ruled = replace(config, verifier=verifier, verifier_args=_VERIFIER_ARGS.get(verifier, {}))
            if issubclass(cls, Drafter):
                if cls.law in built.laws:
                    yield Member(config=ruled, law=cls.law, tree="")
                continue
            for tree in known_trees:
                if tree.proposer.law in built.laws and tree.proposer.needs in cls.provides:
                    yield Member(
                        config=replace(ruled, tree=tree.name, tree_args=tree.args),
                        law=tree.proposer.law,
                        tree=tree.label,
                    )


def trees(skipped: list[str]) -> Iterator[Tree]:
    """Every registered tree in every way to draw that it has."""
    for name, cls in _classes(TREES, skipped):
        parameters = inspect.signature(cls).parameters
        small = {key: value for key, value in _SMALL.items() if key in parameters}
        missing = set(laws_of(cls))
        for variant in _VARIANTS:
            if not variant.keys() <= parameters.keys():
                continue
            args = {**small, **variant}
            for _, proposer in _usable(TREES, {name: args}, skipped, [name]):
                missing.discard(proposer.law)
                yield Tree(label=_label(name, variant), name=name, args=args, proposer=proposer)
        skipped += [
            f"tree={name} under the {law.value} law: no arguments for it are known" for law in missing
        ]


def _classes(registry: Registry[T], skipped: list[str]) -> list[tuple[str, type[T]]]:
    """What a registry holds; a plug-in that can't be imported is skipped."""
    found = []
    for name in registry.names():
        try:
            found.append((name, registry.get(name)))
        except ValueError as error:
            skipped.append(f"{registry.kind}={name}: {error}")
    return found


def _usable(
    registry: Registry[T],
    arguments: Mapping[str, Mapping[str, Any]],
    skipped: list[str],
    names: Sequence[str] | None = None,
) -> Iterator[tuple[str, T]]:
    """Objects of those classes that can be created."""
    for name in names or [name for name, _ in _classes(registry, skipped)]:
        try:
            yield name, registry.create(name, **arguments.get(name, {}))
        except ValueError as error:
            skipped.append(f"{registry.kind}={name}: {error}")


def _drafter_args() -> dict[str, dict[str, Any]]:
    """Arguments of the drafters that can't do without, or that are more telling with some."""
    return {
        "early_exit": {"num_layers": 1},
        "scripted": {"script": next_tokens, "max_nodes": 4},
        "small_lm": {"model": tiny_draft()},
    }


def next_tokens(request: int, committed: Sequence[int]) -> list[int | tuple[int, int]]:
    """A script: two children a function of the last token, and a child of the first."""
    last = committed[-1]
    first, second = (5 * last + 6) % VOCAB_SIZE, (7 * last + 18) % VOCAB_SIZE
    return [(first, 0), (second, 0), ((first + 3) % VOCAB_SIZE, 1)]


def _label(name: str, variant: Mapping[str, Any]) -> str:
    marks = [key if value is True else str(value) for key, value in variant.items()]
    return " ".join([name, *marks])
