"""Trees of any shape whose tokens are drawn node by node: what a law means, by coins and by weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from specdec_tests.laws import Conditional, warped

from specdec.core import ProposalLaw, SamplingParams, Stream, TokenTree
from specdec.core.sampling import sample
from specdec.drafters.base import DraftBatch


def drawn_tree(
    shape: Sequence[int], draft: Conditional, law: ProposalLaw
) -> Callable[[DraftBatch], TokenTree]:
    """Proposes a tree whose node i + 1 has the parent `shape[i]`; siblings are drawn in that order.

    Without replacement a node whose parent's q has no mass left is left out, and so is what hangs on it.
    """

    def propose(batch: DraftBatch) -> TokenTree:
        trees, q, q_rows = [], [], []
        for row in range(batch.size):
            tree, distributions, rows = _draw(shape, draft, law, batch, row)
            trees.append(tree)
            q_rows += [index + len(q) if index >= 0 else -1 for index in rows]
            q += distributions
        return TokenTree.from_lists(
            batch.roots,
            trees,
            batch.root_positions,
            law,
            q=torch.stack(q) if q else None,
            q_row=torch.tensor(q_rows) if q else None,
        )

    return propose


def _draw(
    shape: Sequence[int], draft: Conditional, law: ProposalLaw, batch: DraftBatch, row: int
) -> tuple[list[tuple[int, int]], list[torch.Tensor], list[int]]:
    tree: list[tuple[int, int]] = []
    index_of = {0: 0}
    paths: list[tuple[int, ...]] = [()]
    left: dict[int, torch.Tensor] = {}
    q: list[torch.Tensor] = []
    rows = [-1]
    for node, shape_parent in enumerate(shape, start=1):
        if shape_parent not in index_of:
            continue
        parent = index_of[shape_parent]
        if parent not in left:
            left[parent] = warped(draft, paths[parent], batch.sampling.params[row]).clone()
            rows[parent] = len(q)
            q.append(left[parent].clone())
        if left[parent].sum() <= 0:
            continue
        index = len(paths)
        coin = batch.rng.uniform(
            torch.tensor([row]), batch.root_positions[row : row + 1], torch.tensor([index]), Stream.DRAFT
        )
        token = int(sample(left[parent].unsqueeze(0), coin))
        if law is ProposalLaw.WITHOUT_REPLACEMENT:
            left[parent][token] = 0
        tree.append((token, parent))
        index_of[node] = index
        paths.append((*paths[parent], token))
        rows.append(-1)
    return tree, q, rows


@dataclass(frozen=True)
class AllDraws:
    """Every outcome of drawing the tokens of a shape, with its probability; `propose` is for `Game`.

    Args:
        shape: parents, as in `drawn_tree`.
        draft: q.
        law: not deterministic.
        params: warping of q.
    """

    shape: tuple[int, ...]
    draft: Conditional
    law: ProposalLaw
    params: SamplingParams

    @cached_property
    def cases(self) -> list[tuple[tuple[int, ...], float]]:
        """Tokens of the nodes, -1 for a node that no mass was left for, and the probability."""
        cases: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for _ in self.shape:
            cases = [
                ((*tokens, token), weight * probability)
                for tokens, weight in cases
                for token, probability in self._next(tokens)
            ]
        return cases

    @property
    def weights(self) -> list[float]:
        return [weight for _, weight in self.cases]

    def propose(self, batch: DraftBatch) -> TokenTree:
        parts = [self._parts[case] for case in batch.request_ids]
        trees = [entries for entries, _, _ in parts]
        q_row, first = [], 0
        for _, rows, q in parts:
            q_row += [first + row if row >= 0 else -1 for row in rows]
            first += len(q)
        return TokenTree.from_lists(
            batch.roots,
            trees,
            batch.root_positions,
            self.law,
            q=torch.stack([row for _, _, q in parts for row in q]),
            q_row=torch.tensor(q_row),
        )

    def _next(self, tokens: tuple[int, ...]) -> list[tuple[int, float]]:
        """The token of the next node and its probability."""
        parent = self.shape[len(tokens)]
        if parent and tokens[parent - 1] < 0:
            return [(-1, 1.0)]
        left = self._q(tokens, parent).double()
        if self.law is ProposalLaw.WITHOUT_REPLACEMENT:
            siblings = [tokens[node] for node in range(len(tokens)) if self.shape[node] == parent]
            left[[token for token in siblings if token >= 0]] = 0
        mass = float(left.sum())
        if mass <= 0:
            return [(-1, 1.0)]
        return [(token, weight / mass) for token, weight in enumerate(left.tolist()) if weight > 0]

    def _q(self, tokens: tuple[int, ...], node: int) -> torch.Tensor:
        path: tuple[int, ...] = ()
        while node:
            path = (tokens[node - 1], *path)
            node = self.shape[node - 1]
        return warped(self.draft, path, self.params)

    @cached_property
    def _parts(self) -> list[tuple[list[tuple[int, int]], list[int], list[torch.Tensor]]]:
        """Of each case: the nodes, the rows of q, and q."""
        parts = []
        for tokens, _ in self.cases:
            index_of, entries, rows, q = {0: 0}, [], [-1], []
            for node, (token, parent) in enumerate(zip(tokens, self.shape, strict=True), start=1):
                if token < 0:
                    continue
                if rows[index_of[parent]] < 0:
                    rows[index_of[parent]] = len(q)
                    q.append(self._q(tokens, parent))
                index_of[node] = len(rows)
                entries.append((token, index_of[parent]))
                rows.append(-1)
            parts.append((entries, rows, q))
        return parts
