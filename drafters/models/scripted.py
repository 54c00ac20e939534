"""A drafter that follows a script: tests and studies decide what is proposed, node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.core import ProposalLaw, TokenTree
from specdec.core.checks import check_positive
from specdec.drafters.base import DraftBatch, Drafter

Script = Callable[[int, Sequence[int]], Sequence[int | tuple[int, int]]]
"""Given a request's number and its committed tokens, returns a chain of tokens, or `(token, parent)` pairs
with parents as node indices (0 is the root)."""


class ScriptedDrafter(Drafter):
    """Proposes what a given function or fixed continuation says; for tests and controlled studies."""

    law = ProposalLaw.DETERMINISTIC

    def __init__(self, script: Script | Sequence[int] = (), max_nodes: int = 8) -> None:
        check_positive("max_nodes", max_nodes)
        self.max_nodes = max_nodes
        self.script = script if callable(script) else _always(list(script))

    def propose(self, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        trees = []
        for row in range(batch.size):
            entries = self.script(batch.request_ids[row], batch.token_ids[row])
            trees.append(_clip(_with_parents(entries), budget[row], batch.max_depths[row]))
        return TokenTree.from_lists(batch.roots, trees, batch.root_positions, self.law)


def _always(tokens: list[int]) -> Script:
    def script(request_id: int, committed: Sequence[int]) -> Sequence[int]:
        return tokens

    return script


def _with_parents(entries: Sequence[int | tuple[int, int]]) -> list[tuple[int, int]]:
    return [(entry, index) if isinstance(entry, int) else entry for index, entry in enumerate(entries)]


def _clip(tree: list[tuple[int, int]], budget: int, max_depth: int) -> list[tuple[int, int]]:
    """The first nodes that fit budget and depth; nodes are renumbered where deeper ones drop out."""
    depths, new_index = {0: 0}, {0: 0}
    kept: list[tuple[int, int]] = []
    for node, (token, parent) in enumerate(tree, start=1):
        if len(kept) == budget:
            break
        depths[node] = depths[parent] + 1
        if depths[node] <= max_depth and parent in new_index:
            kept.append((token, new_index[parent]))
            new_index[node] = len(kept)
    return kept
