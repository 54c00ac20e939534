"""`specdec ls`: what can be named on the command line, plug-ins included."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from specdec.cli.overrides import config_folders, options, packaged_targets
from specdec.core import ProposalLaw, Registry
from specdec.drafters.base import Drafter, DraftModel, TreeProposer, laws_of
from specdec.drafters.registry import DRAFTERS, TREES
from specdec.evaluation.table import TextTable
from specdec.verifiers.base import Verifier
from specdec.verifiers.registry import VERIFIERS

_ALL = frozenset(ProposalLaw)


def main(arguments: list[str]) -> int:
    """Prints every registered drafter, tree and verifier with the laws they give or fit, and what they need."""
    parser = argparse.ArgumentParser(
        prog="specdec ls",
        description="Lists drafters, trees and verifiers with their laws, targets and presets.",
    )
    parser.parse_args(arguments)
    _table("drafters (drafter=)", DRAFTERS, {"law": _drafter_law, "provides": _provides}).print()
    print()
    _table("trees (tree=)", TREES, {"law of the tree": _tree_law, "needs": _needs}).print()
    print()
    _table("verifiers (verifier=)", VERIFIERS, {"exact for": _verifier_laws}).print()
    print()
    folders = config_folders([])
    print(
        f"packaged targets (target=): {', '.join(packaged_targets(folders))}; any hub id, folder or GGUF file"
    )
    print(f"pairs of tree and verifier (pair=): {', '.join(options('pair', folders))}")
    print(f"presets (experiment=): {', '.join(options('experiment', folders))}")
    return 0


def _table(title: str, registry: Registry[Any], facts: Mapping[str, Callable[[Any], str]]) -> TextTable:
    rows = []
    for name in registry.names():
        try:
            cls = registry.get(name)
        except ValueError as error:
            # A plug-in that can't be imported must not hide the others.
            rows.append([name, *[""] * len(facts), str(error)])
        else:
            rows.append([name, *(fact(cls) for fact in facts.values()), registry.describe(name)])
    return TextTable(title=title, columns=["name", *facts, "what it is"], rows=rows, numeric=False)


def _drafter_law(cls: type[Drafter | DraftModel]) -> str:
    return cls.law.value if issubclass(cls, Drafter) else "the tree's"


def _provides(cls: type[Drafter | DraftModel]) -> str:
    return (
        "whole trees" if issubclass(cls, Drafter) else ", ".join(sorted(each.value for each in cls.provides))
    )


def _tree_law(cls: type[TreeProposer]) -> str:
    return " or ".join(law.value for law in laws_of(cls))


def _needs(cls: type[TreeProposer]) -> str:
    return cls.needs.value


def _verifier_laws(cls: type[Verifier]) -> str:
    if cls.lossy:
        return "none (LOSSY, for study)"
    laws = "any" if cls.laws == _ALL else ", ".join(sorted(law.value for law in cls.laws))
    return f"{laws} (temperature 0)" if cls.greedy_only else laws
