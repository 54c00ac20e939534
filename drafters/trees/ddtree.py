"""DDTree: the best tree under per-depth marginals, from a single draft pass.

A drafter that predicts all depths at once gives each depth a distribution that ignores what was drafted before it.
Under their product the best `num_nodes` paths come off a heap: a path is followed by its next sibling, in rank, and
by its best child.
Law: DETERMINISTIC.
Needs of a drafter: marginals by depth.
Source: DDTree, arXiv:2604.12989.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from specdec.core import ProposalLaw, TokenTree
from specdec.core.checks import check_positive
from specdec.drafters.base import DraftBatch, DraftModel, DraftOutput, TreeProposer

Level = Sequence[tuple[int, float]]
"""Candidates of one depth, best first: token and log probability."""


class DDTreeProposer(TreeProposer):
    """The `num_nodes` likeliest paths under the product of per-depth marginals."""

    law = ProposalLaw.DETERMINISTIC
    needs = DraftOutput.MARGINALS

    def __init__(self, num_nodes: int = 16, max_depth: int = 8) -> None:
        check_positive("num_nodes", num_nodes)
        check_positive("max_depth", max_depth)
        self.max_nodes = num_nodes
        self.max_depth = max_depth

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        depths = [min(self.max_depth, depth) for depth in batch.max_depths]
        trees: list[list[tuple[int, int]]] = []
        scores: list[float] = []
        levels = self._candidates(model, batch, max(depths))
        for own, nodes, depth in zip(levels, budget, depths, strict=True):
            tree, values = best_tree(own[:depth], min(nodes, self.max_nodes))
            trees.append(tree)
            scores += [0.0, *values]
        score = torch.tensor(scores, device=batch.roots.device)
        return TokenTree.from_lists(batch.roots, trees, batch.root_positions, self.law, score=score)

    def _candidates(self, model: DraftModel, batch: DraftBatch, depth: int) -> list[list[Level]]:
        """For each request and depth the likeliest tokens: no tree needs more than it may have nodes."""
        log_q = model.marginals(batch, depth).float().log_softmax(-1)  # [B, D, V]
        best, tokens = log_q.topk(min(self.max_nodes, log_q.shape[-1]), dim=-1)  # [B, D, k]
        # Impossible tokens are no candidates, nor is a depth that nothing is known of (all NaN).
        return [
            [
                [(token, value) for token, value in zip(ids, values, strict=True) if value > float("-inf")]
                for ids, values in zip(*request, strict=True)
            ]
            for request in zip(tokens.tolist(), best.tolist(), strict=True)
        ]


def best_tree(levels: Sequence[Level], num_nodes: int) -> tuple[list[tuple[int, int]], list[float]]:
    """The likeliest paths over given levels as `(token, parent)` nodes, best first, and their log probabilities.

    Ties go to the shallower path, then to the one whose parent came first.
    """
    tree: list[tuple[int, int]] = []
    scores = [0.0]
    # Negated score, depth, parent, rank.
    heap: list[tuple[float, int, int, int]] = []

    def push(depth: int, parent: int, rank: int) -> None:
        if depth <= len(levels) and rank < len(levels[depth - 1]):
            heapq.heappush(heap, (-scores[parent] - levels[depth - 1][rank][1], depth, parent, rank))

    push(1, 0, 0)
    while heap and len(tree) < num_nodes:
        negated, depth, parent, rank = heapq.heappop(heap)
        tree.append((levels[depth - 1][rank][0], parent))
        scores.append(-negated)
        push(depth, parent, rank + 1)
        push(depth + 1, len(tree), 0)
    return tree, scores[1:]
