"""A rule for drawn chains, right in itself, and ways to break it; what `specdec check` has to notice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, Stream, TokenTree
from specdec.core.sampling import sample
from specdec.drafters.base import DraftBatch, DraftModel
from specdec.drafters.trees.expansion import ExpansionProposer
from specdec.losslessness.controls import sort_siblings
from specdec.verifiers.base import Acceptance, TargetProbs, Verifier
from specdec.verifiers.walk import acceptance_coins, descend, draw_from_target


class ChainRule(Verifier):
    """Token rejection, in a few lines."""

    laws = frozenset({ProposalLaw.CHAIN})

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        def decide(nodes: Tensor) -> tuple[Tensor, Tensor]:
            child = tree.first_child[nodes].clone()
            token = draw_from_target(p, nodes, rng)
            inner = child >= 0
            if bool(inner.any()):
                at, below = nodes[inner], child[inner]
                q, rows, drafted = tree.q[tree.q_row[at]], p.rows(at), tree.tokens[below]
                coins = self.coins(tree, below, rng)
                kept = self.accepts(pick(rows, drafted), pick(q, drafted), coins)
                token[inner] = self.correct(tree, at, rows, q, coins, rng)
                child[inner] = torch.where(kept, below, -1)
            return child, token

        return descend(tree, decide)

    def coins(self, tree: TokenTree, nodes: Tensor, rng: CounterRng) -> Tensor:
        return acceptance_coins(tree, nodes, rng)

    def accepts(self, p: Tensor, q: Tensor, coins: Tensor) -> Tensor:
        return coins * q < p

    def correct(
        self, tree: TokenTree, nodes: Tensor, p: Tensor, q: Tensor, coins: Tensor, rng: CounterRng
    ) -> Tensor:
        weights = (p - q).clamp(min=0)
        empty = weights.sum(-1, keepdim=True) <= 0
        return sample(torch.where(empty, p, weights), self.residual_coins(tree, nodes, coins, rng))

    def residual_coins(self, tree: TokenTree, nodes: Tensor, coins: Tensor, rng: CounterRng) -> Tensor:
        zeros = torch.zeros_like(nodes)
        return rng.uniform(tree.request_of_node[nodes], tree.positions[nodes] + 1, zeros, Stream.RESIDUAL)


class Swapped(ChainRule):
    """Accepts with q / p."""

    def accepts(self, p: Tensor, q: Tensor, coins: Tensor) -> Tensor:
        return coins * p < q


class NotRenormalised(ChainRule):
    """Draws from the residual as if it summed to 1; what is missing goes to the last token."""

    def correct(
        self, tree: TokenTree, nodes: Tensor, p: Tensor, q: Tensor, coins: Tensor, rng: CounterRng
    ) -> Tensor:
        weights = (p - q).clamp(min=0)
        weights[:, -1] += 1 - weights.sum(-1)
        return sample(weights.clamp(min=0), self.residual_coins(tree, nodes, coins, rng))


class ReusedCoin(ChainRule):
    """Corrects with the coin that rejected."""

    def residual_coins(self, tree: TokenTree, nodes: Tensor, coins: Tensor, rng: CounterRng) -> Tensor:
        return coins


class AskedTwice(ChainRule):
    """Asks for the same coin again."""

    def residual_coins(self, tree: TokenTree, nodes: Tensor, coins: Tensor, rng: CounterRng) -> Tensor:
        return acceptance_coins(tree, tree.first_child[nodes], rng)


class GlobalCoins(ChainRule):
    """Takes its coins from torch's global generator: exact, and not reproducible."""

    def coins(self, tree: TokenTree, nodes: Tensor, rng: CounterRng) -> Tensor:
        return torch.rand(len(nodes), dtype=torch.float64)


class RowCoins(ChainRule):
    """Coins that depend on the place in the batch."""

    def coins(self, tree: TokenTree, nodes: Tensor, rng: CounterRng) -> Tensor:
        honest = acceptance_coins(tree, nodes, rng)
        return (honest + 0.37 * tree.request_of_node[nodes]) % 1


class SortedProposer(ExpansionProposer):
    """Drawn siblings, likeliest first."""

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        return sort_siblings(super().propose(model, batch, budget))


def pick(rows: Tensor, tokens: Tensor) -> Tensor:
    """The entry of each row at its token."""
    return rows.gather(1, tokens.unsqueeze(1)).squeeze(1).double()
