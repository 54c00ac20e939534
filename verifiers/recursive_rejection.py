"""Recursive rejection: try the drawn children of a node in turn, each against what the others left of p.

A child x is accepted with probability min(1, p(x) / q(x)); a rejection turns p into the normalised max(p - q, 0).
This is the shared body of three rules, which differ in the law they are for: `token` (one draw a level), `rrs`
(draws with replacement: q stays) and `rrsw` (without replacement: q loses the rejected token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core import CounterRng, TokenTree
from specdec.verifiers.base import Acceptance, TargetProbs, Verifier
from specdec.verifiers.greedy import greedy_walk
from specdec.verifiers.walk import (
    acceptance_coins,
    descend_drawn,
    draw_correction,
    drawn_without_replacement,
)

# Keeps a row without mass a row of zeros.
_TINY = torch.finfo(torch.float32).tiny


class RecursiveRejectionVerifier(Verifier):
    """Accepts the drawn children of a node in turn with min(1, p/q); the laws tell what q is."""

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if p.all_greedy:
            return greedy_walk(tree, p)
        return descend_drawn(tree, p, rng, lambda nodes: _try_children(tree, p, rng, nodes))


def _try_children(tree: TokenTree, p: TargetProbs, rng: CounterRng, nodes: Tensor) -> tuple[Tensor, Tensor]:
    weights, q = p.rows(nodes), tree.q_of(nodes)  # [n, V], what is left of p and of q
    removes = drawn_without_replacement(tree)[tree.request_of_node[nodes]]  # [n]
    accepted = torch.full_like(nodes, -1)
    child = tree.first_child[nodes]
    trying = torch.arange(len(nodes), device=nodes.device)
    while len(trying):
        candidate = child[trying]
        token = tree.tokens[candidate]
        coin = acceptance_coins(tree, candidate, rng)
        # Both are divided by their sums, so that p = q is accepted whatever the rounding. The comparison is strict
        # and has no division: p = 0 is never accepted, q = 0 needs no special case.
        p_mass, q_mass = weights[trying].sum(-1), q[trying].sum(-1)
        accept = coin * q[trying, token].double() * p_mass < weights[trying, token].double() * q_mass
        accepted[trying[accept]] = candidate[accept]
        lost = ~accept
        trying, token = trying[lost], token[lost]
        weights[trying] = residual(weights[trying], q[trying], p_mass[lost], q_mass[lost])
        q[trying[removes[trying]], token[removes[trying]]] = 0
        child[trying] = tree.next_sibling[child[trying]]
        trying = trying[child[trying] >= 0]
    return accepted, _correct(weights, p, nodes, accepted < 0, rng)


def residual(p: Tensor, q: Tensor, p_mass: Tensor, q_mass: Tensor) -> Tensor:
    """max(p - q, 0) of two `[n, V]` weights after division by their masses `[n]`; itself not normalised."""
    p_scale, q_scale = (mass.clamp(min=_TINY).reciprocal().unsqueeze(1) for mass in (p_mass, q_mass))
    return (p * p_scale - q * q_scale).clamp_(min=0)


def _correct(weights: Tensor, p: TargetProbs, nodes: Tensor, rejected: Tensor, rng: CounterRng) -> Tensor:
    token = torch.zeros_like(nodes)
    token[rejected] = draw_correction(weights[rejected], p, nodes[rejected], rng)
    return token
