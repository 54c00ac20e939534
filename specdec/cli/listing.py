"""`specdec ls`: what can be named on the command line, plug-ins included."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from specdec.cli.overrides import config_folders, options, packaged_targets
from specdec.core import ProposalLaw, Registry
from specdec.drafters.base import Drafter, DraftModel, TreeProposer
from specdec.drafters.registry import DRAFTERS, TREES
from specdec.evaluation.table import TextTable
from specdec.verifiers.base import Verifier
from specdec.verifiers.registry import VERIFIERS

_ALL = frozenset(ProposalLaw)


def main(arguments: list[str]) -> int:
    """Prints every registered drafter, tree and verifier with the laws they give or fit."""
    parser = argparse.ArgumentParser(
        prog="specdec ls",
        description="Lists drafters, trees and verifiers with their laws, targets and presets.",
    )
    parser.parse_args(arguments)
    _table("drafters (drafter=)", "law", DRAFTERS, _drafter_law).print()
    print()
    _table("trees (tree=)", "law of the tree", TREES, _tree_law).print()
    print()
    _table("verifiers (verifier=)", "exact for", VERIFIERS, _verifier_laws).print()
    print()
    folders = config_folders([])
    print(
        f"packaged targets (target=): {', '.join(packaged_targets(folders))}; any hub id, folder or GGUF file"
    )
    print(f"presets (experiment=): {', '.join(options('experiment', folders))}")
    return 0


def _table(title: str, law: str, registry: Registry[Any], describe_law: Callable[[Any], str]) -> TextTable:
    rows = []
    for name in registry.names():
        try:
            rows.append([name, describe_law(registry.get(name)), registry.describe(name)])
        except ValueError as error:
            # A plug-in that can't be imported must not hide the others.
            rows.append([name, "", str(error)])
    return TextTable(title=title, columns=["name", law, "what it is"], rows=rows, numeric=False)


def _drafter_law(cls: type[Drafter | DraftModel]) -> str:
    return cls.law.value if issubclass(cls, Drafter) else "the tree's"


def _tree_law(cls: type[TreeProposer]) -> str:
    return " or ".join(law.value for law in cls.possible_laws or (cls.law,))


def _verifier_laws(cls: type[Verifier]) -> str:
    laws = "any" if cls.laws == _ALL else ", ".join(sorted(law.value for law in cls.laws))
    marks = [mark for mark, holds in (("temperature 0", cls.greedy_only), ("LOSSY", cls.lossy)) if holds]
    return f"{laws} ({', '.join(marks)})" if marks else laws
