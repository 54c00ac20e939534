"""Static tree: a fixed shape given by sibling ranks, the same at every step.

Source: Medusa, arXiv:2401.10774, section 2.1.2; the path [0, 2] is the third-best child of the best child.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core import ProposalLaw, TokenTree
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.builder import TreeBuilder

# Two branches on the first levels, one below: a shape that is never far off.
DEFAULT_PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0))


class StaticProposer(TreeProposer):
    """A fixed tree of top-k children, given as paths of sibling ranks."""

    law = ProposalLaw.DETERMINISTIC

    def __init__(self, paths: Sequence[Sequence[int]] = DEFAULT_PATHS) -> None:
        self.paths = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        _check(self.paths)
        self.max_nodes = len(self.paths)
        self.branching = 1 + max(path[-1] for path in self.paths)

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        builder = TreeBuilder(batch, max(min(nodes, self.max_nodes) for nodes in budget))
        node_of: list[dict[tuple[int, ...], int]] = [{(): 0} for _ in range(batch.size)]
        # A smaller budget takes the first paths, which are closed under parents: shorter ones come first.
        wanted = [
            [path for path in self.paths[:nodes] if len(path) <= depth]
            for nodes, depth in zip(budget, batch.max_depths, strict=True)
        ]
        for level in range(1, len(self.paths[-1]) + 1):
            self._grow_level(
                model, builder, node_of, [[p for p in paths if len(p) == level] for paths in wanted]
            )
        return builder.build(self.law)

    def _grow_level(
        self,
        model: DraftModel,
        builder: TreeBuilder,
        node_of: list[dict[tuple[int, ...], int]],
        wanted: list[list[tuple[int, ...]]],
    ) -> None:
        """Adds the wanted paths of one level whose parent exists."""
        children = [
            (row, path) for row, paths in enumerate(wanted) for path in paths if path[:-1] in node_of[row]
        ]
        sources = list(dict.fromkeys((row, node_of[row][path[:-1]]) for row, path in children))
        if not sources:
            return
        tokens, log_q = model.top_k(
            builder.frontier([row for row, _ in sources], [node for _, node in sources]), self.branching
        )
        line_of = {source: line for line, source in enumerate(sources)}
        lines = [line_of[row, node_of[row][path[:-1]]] for row, path in children]
        ranks = [path[-1] for _, path in children]
        exists = (log_q[lines, ranks] > float("-inf")).tolist()
        kept = [index for index, found in enumerate(exists) if found]
        rows = [children[index][0] for index in kept]
        parents = [node_of[row][children[index][1][:-1]] for row, index in zip(rows, kept, strict=True)]
        lines, ranks = [lines[index] for index in kept], [ranks[index] for index in kept]
        nodes = builder.add(rows, parents, tokens[lines, ranks], log_q[lines, ranks])
        for row, index, node in zip(rows, kept, nodes, strict=True):
            node_of[row][children[index][1]] = node


def _check(paths: list[tuple[int, ...]]) -> None:
    if not paths or min(len(path) for path in paths) < 1:
        raise ValueError(f"paths={paths}: expected at least one path, none of them empty")
    for path in paths:
        if min(path) < 0:
            raise ValueError(f"paths: {list(path)} holds a negative sibling rank; ranks count from 0")
        if len(path) > 1 and path[:-1] not in paths:
            raise ValueError(f"paths: {list(path)} has no parent; add {list(path[:-1])}")
