"""EAGLE-2: a beam of `top_k` nodes a level, then the best nodes of all levels by cumulative q.

Each level expands the `top_k` best nodes of the level above and looks at `top_k` children of each; in the end the
`num_nodes` best of everything seen are kept. Scores fall along a path and parents come first among equals, so the
kept nodes always form a tree. Beam nodes that the end would drop anyway are not expanded; the result is the same.
EAGLE's `total_tokens` counts the root, `num_nodes` doesn't; its `depth` counts the levels after the first.
Law: DETERMINISTIC.
Needs of a drafter: next-token logits after any path.
Source: Li et al., "EAGLE-2", arXiv:2406.16858, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core import ProposalLaw, TokenTree
from specdec.core.checks import check_positive
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.candidates import Candidates


class Eagle2Proposer(TreeProposer):
    """Beam search of width `top_k` over `depth` levels, reranked to `num_nodes` nodes by cumulative q."""

    law = ProposalLaw.DETERMINISTIC

    def __init__(self, num_nodes: int = 24, depth: int = 5, top_k: int = 8) -> None:
        for name, value in (("num_nodes", num_nodes), ("depth", depth), ("top_k", top_k)):
            check_positive(name, value)
        self.max_nodes = num_nodes
        self.depth = depth
        self.top_k = top_k

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        limits = [min(nodes, self.max_nodes) for nodes in budget]
        candidates = Candidates(batch, limits, [min(self.depth, depth) for depth in batch.max_depths])
        sources = [(row, 0) for row in range(batch.size) if candidates.waiting(row)]
        while sources:
            level = candidates.expand(model, sources, self.top_k)
            useful = {row: set(candidates.waiting(row)) for row in level}
            sources = [
                (row, node)
                for row, nodes in level.items()
                for node in nodes[: self.top_k]
                if node in useful[row]
            ]
        return candidates.build(self.law)
