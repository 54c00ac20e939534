"""Best-first tree: the nodes with the largest cumulative q, within a node budget and as many expansions.

Each round expands, in one batch, the nodes that are among the best known ones and not expanded yet; it ends when
all of them are, or after one expansion a node of the budget and one for the root. With enough expansions it is the
best tree of its size under q; `opt_tree` goes on until it is.
Law: DETERMINISTIC.
Needs of a drafter: next-token logits after any path.
Source: the idea is shared by OPT-Tree, arXiv:2406.17276, and EAGLE-2, arXiv:2406.16858; the rounds are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core import ProposalLaw, TokenTree
from specdec.core.checks import check_positive
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.candidates import Candidates


class BestFirstProposer(TreeProposer):
    """The `num_nodes` nodes with the largest cumulative q, up to `max_depth` levels."""

    law = ProposalLaw.DETERMINISTIC

    def __init__(self, num_nodes: int = 16, max_depth: int = 6, branching: int = 4) -> None:
        for name, value in (("num_nodes", num_nodes), ("max_depth", max_depth), ("branching", branching)):
            check_positive(name, value)
        self.max_nodes = num_nodes
        self.max_depth = max_depth
        self.branching = branching

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        limits = [min(nodes, self.max_nodes) for nodes in budget]
        candidates = Candidates(batch, limits, [min(self.max_depth, depth) for depth in batch.max_depths])
        room = [limit + 1 for limit in limits]
        while sources := [
            (row, node) for row in range(batch.size) for node in candidates.waiting(row)[: room[row]]
        ]:
            candidates.expand(model, sources, self.branching)
            for row, _ in sources:
                room[row] -= 1
        return candidates.build(self.law)
