"""`ModelDrafter`: any draft model with any tree proposer is a drafter."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core import TokenTree
from specdec.drafters.base import Commit, DraftBatch, Drafter, DraftModel, TreeProposer


class ModelDrafter(Drafter):
    """Joins a draft model and a tree proposer."""

    scores_nodes = True

    def __init__(self, model: DraftModel, proposer: TreeProposer) -> None:
        self.model = model
        self.proposer = proposer
        self.law = proposer.law
        self.max_nodes = proposer.max_nodes
        self.features = model.features

    def propose(self, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        if not any(budget):
            return TokenTree.root_only(batch.roots, batch.root_positions)
        self.model.extend(batch)
        return self.proposer.propose(self.model, batch, budget)

    def observe(self, commit: Commit) -> None:
        self.model.observe(commit)

    def free(self, request_ids: Sequence[int]) -> None:
        self.model.free(request_ids)

    def memory_bytes(self) -> int:
        return self.model.memory_bytes()
