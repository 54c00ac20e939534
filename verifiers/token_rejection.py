"""Token-level rejection: accept a drafted token with probability min(1, p/q), else draw from the residual.

Guarantee: the joint law of the output equals the target's. For one draw a level, P(accept) = 1 - TV(p, q).
Laws: CHAIN, with q as drawn; DETERMINISTIC, where q is a point mass: a child is accepted with its residual
probability and leaves the residual when rejected, so any number of siblings, duplicates included, is exact.
Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, Stream, TokenTree
from specdec.core.sampling import sample
from specdec.verifiers.base import Acceptance, TargetProbs, Verifier, acceptance_of
from specdec.verifiers.greedy import greedy_walk


class TokenRejectionVerifier(Verifier):
    """Accepts with min(1, p/q) and corrects from max(p - q, 0); exact for chains and deterministic trees."""

    laws = frozenset({ProposalLaw.CHAIN, ProposalLaw.DETERMINISTIC})

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if p.all_greedy:
            return greedy_walk(tree, p)
        current = tree.roots.clone()  # [B]
        next_token = torch.zeros_like(current)
        active = torch.arange(tree.batch_size, device=current.device)
        while len(active):
            child, token = _decide_level(tree, p, rng, current[active])
            next_token[active] = token
            active, child = active[child >= 0], child[child >= 0]
            current[active] = child
        return acceptance_of(tree, current, next_token)


def _decide_level(tree: TokenTree, p: TargetProbs, rng: CounterRng, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Tries the children of n nodes in order.

    Returns:
        The accepted child of each node, -1 if none, and the token drawn instead, both `[n]` int64; the token
        means something only where no child was accepted.
    """
    requests = tree.request_of_node[nodes]
    positions = tree.positions[nodes] + 1
    residual = p.rows(nodes)  # [n, V]
    accepted = torch.full_like(nodes, -1)
    rejected_any = torch.zeros_like(nodes, dtype=torch.bool)
    child = tree.first_child[nodes]
    trying = (child >= 0).nonzero().squeeze(1)
    while len(trying):
        candidate = child[trying]
        token = tree.tokens[candidate].unsqueeze(1)
        coin = rng.uniform(
            requests[trying], positions[trying], tree.index_in_request[candidate], Stream.ACCEPT
        )
        weights, q = residual[trying], _drawn_from(tree, nodes[trying], token, residual.shape[1])
        # Both are normalised by their sums, so that p = q is accepted whatever the rounding.
        p_mass, q_mass = (values.sum(-1, dtype=torch.float64) for values in (weights, q))
        q_token, p_token = q.gather(1, token).squeeze(1), weights.gather(1, token).squeeze(1)
        # Strict, and without a division: p = 0 is never accepted, q = 0 needs no special case.
        accept = coin * q_token.double() * p_mass < p_token.double() * q_mass
        accepted[trying[accept]] = candidate[accept]
        lost = trying[~accept]
        p_scale, q_scale = (mass[~accept].float().unsqueeze(1) for mass in (q_mass, p_mass))
        residual[lost] = (weights[~accept] * p_scale - q[~accept] * q_scale).clamp_(min=0)
        rejected_any[lost] = True
        child[lost] = tree.next_sibling[child[lost]]
        trying = lost[child[lost] >= 0]
    return accepted, _draw_rest(tree, p, rng, nodes, residual, rejected_any)


def _drawn_from(tree: TokenTree, nodes: Tensor, token: Tensor, vocab_size: int) -> Tensor:
    """q behind a child of each node, `[n, V]` float32: the recorded distribution, or a point mass."""
    point_mass = torch.zeros(len(nodes), vocab_size, device=nodes.device).scatter_(1, token, 1.0)
    if tree.q is None or tree.q_row is None:
        return point_mass
    row = tree.q_row[nodes]
    return torch.where((row >= 0).unsqueeze(1), tree.q[row.clamp(min=0)], point_mass)


def _draw_rest(
    tree: TokenTree, p: TargetProbs, rng: CounterRng, nodes: Tensor, residual: Tensor, rejected_any: Tensor
) -> Tensor:
    # p = q up to rounding leaves an empty residual: the target itself is then the right law.
    empty = residual.sum(-1) <= 0
    if bool(empty.any()):
        residual[empty] = p.rows(nodes[empty])
    requests, positions = tree.request_of_node[nodes], tree.positions[nodes] + 1
    zeros = torch.zeros_like(nodes)
    bonus = rng.uniform(requests, positions, zeros, Stream.TARGET)
    correction = rng.uniform(requests, positions, zeros, Stream.RESIDUAL)
    return sample(residual, torch.where(rejected_any, correction, bonus))
