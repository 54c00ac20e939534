"""OPT-Tree: the tree of its size with the largest expected acceptance under q, grown while a level pays.

The expected number of accepted drafted tokens is the sum over the nodes of their path probabilities, so the best
tree holds the nodes with the largest ones. Level by level the nodes that are still among the `num_nodes` best are
expanded; growing ends when a level raises the sum by no more than `delta`, the price of a draft pass.
Law: DETERMINISTIC.
Needs of a drafter: next-token logits after any path.
Source: Wang et al., "OPT-Tree", arXiv:2406.17276.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.core import ProposalLaw, TokenTree
from specdec.core.checks import check, check_positive, is_real
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.candidates import Candidates


class OptTreeProposer(TreeProposer):
    """The best `num_nodes` nodes under q, deepened while the expected acceptance grows by more than `delta`."""

    law = ProposalLaw.DETERMINISTIC

    def __init__(self, num_nodes: int = 16, max_depth: int = 8, delta: float = 0.1) -> None:
        check_positive("num_nodes", num_nodes)
        check_positive("max_depth", max_depth)
        check("delta", delta, is_real(delta) and delta >= 0, ">= 0, in accepted tokens a step")
        self.max_nodes = num_nodes
        self.max_depth = max_depth
        self.delta = delta

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        limits = [min(nodes, self.max_nodes) for nodes in budget]
        candidates = Candidates(batch, limits, [min(self.max_depth, depth) for depth in batch.max_depths])
        expected = dict.fromkeys(range(batch.size), 0.0)
        while sources := [(row, node) for row in expected for node in candidates.waiting(row)]:
            # No node has more children in the tree than the tree has nodes.
            candidates.expand(model, sources, self.max_nodes)
            before, expected = expected, {row: _expected(candidates, row) for row in expected}
            expected = {row: value for row, value in expected.items() if value - before[row] > self.delta}
        return candidates.build(self.law)


def _expected(candidates: Candidates, row: int) -> float:
    """Accepted tokens that the best nodes of a request promise."""
    return math.fsum(math.exp(candidates.scores[row][node]) for node in candidates.best[row] if node)
