"""A global budget: the drafted nodes of a step, shared among the requests of a batch by path score.

Every request drafts as if alone; then the best nodes of the whole batch are kept, at least one of each request that
drafted any. Scores fall along a path, so what is kept of a tree is a tree. Among equals the shallower node comes
first, then the earlier request.
Law: pruning by score looks at the drafted tokens, which is legal only where they are a function of the prefix:
DETERMINISTIC. A request's tree now depends on its batch mates; under an exact rule the law of its tokens doesn't.
Source: the selection step of AdaServe, arXiv:2501.12162, without its latency targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.core import TokenTree
from specdec.core.checks import check_positive
from specdec.drafters.base import Commit, DraftBatch, Drafter


class BudgetedDrafter(Drafter):
    """Another drafter's trees, cut to the best `max_batch_nodes` nodes of the batch.

    Args:
        drafter: its law is DETERMINISTIC and its trees carry `score`.
        max_batch_nodes: drafted nodes of a step; more only where more requests draft, one node each.
    """

    def __init__(self, drafter: Drafter, max_batch_nodes: int) -> None:
        check_positive("max_batch_nodes", max_batch_nodes)
        assert not drafter.law.needs_q, "pruning by score breaks the law of drawn trees"
        self.drafter = drafter
        self.max_batch_nodes = max_batch_nodes
        self.law = drafter.law
        self.max_nodes = drafter.max_nodes
        self.features = drafter.features
        self.scores_nodes = True

    def propose(self, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        tree = self.drafter.propose(batch, budget)
        if sum(tree.num_drafted) <= self.max_batch_nodes:
            return tree
        return prune(tree, best_nodes(tree, self.max_batch_nodes))

    def observe(self, commit: Commit) -> None:
        self.drafter.observe(commit)

    def free(self, request_ids: Sequence[int]) -> None:
        self.drafter.free(request_ids)

    def memory_bytes(self) -> int:
        return self.drafter.memory_bytes()


def best_nodes(tree: TokenTree, num_nodes: int) -> list[int]:
    """The roots and the best-scored drafted nodes, one or more of each request that has any.

    Returns:
        Flat node indices, ascending and closed under parents.
    """
    assert tree.score is not None
    scores, depths = torch.stack((tree.score.double(), tree.depth.double())).tolist()
    requests = tree.request_of_node.tolist()
    # Sorting is stable: among equals of one depth the earlier request comes first.
    drafted = [node for node, depth in enumerate(depths) if depth > 0]
    order = sorted(drafted, key=lambda node: (-scores[node], depths[node]))
    floor = set({requests[node]: node for node in reversed(order)}.values())
    left = max(num_nodes - len(floor), 0)
    others = [node for node in order if node not in floor]
    return sorted([*tree.roots.tolist(), *floor, *others[:left]])


def prune(tree: TokenTree, keep: Sequence[int]) -> TokenTree:
    """The part of trees without q that some nodes make up: flat indices, ascending, closed under parents."""
    requests, parents = tree.request_of_node.tolist(), tree.flat_parents.tolist()
    num_nodes = [0] * tree.batch_size
    new_index = {-1: -1}
    new_parents = []
    for node in keep:
        new_parents.append(new_index[parents[node]])
        new_index[node] = num_nodes[requests[node]]
        num_nodes[requests[node]] += 1
    kept = torch.tensor(keep, device=tree.tokens.device)

    def select(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[kept]

    return replace(
        tree,
        tokens=tree.tokens[kept],
        parents=torch.tensor(new_parents, device=kept.device),
        depth=tree.depth[kept],
        num_nodes=num_nodes,
        score=select(tree.score),
        draft_slots=select(tree.draft_slots),
    )
