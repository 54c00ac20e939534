"""SpecTr k-seq: k independent draws, each accepted with probability min(1, p / (rho q)).

All children of a node face the same test; the first that passes is accepted. rho is the root in [1, k] of
1 - (1 - b)^k = rho b, where b(rho) = sum min(p / rho, q) is the chance that one draw passes. If none passes, the
correction is drawn from p - min(p / rho, q) (1 - (1 - b)^k) / b. That is non-negative for every rho at or above
the root: the upper end of the bracket is used, so the rule is exact however far the search went.
Guarantee: the joint law of the output equals the target's; acceptance is at least 1 - 1/e of the best possible
for k independent draws.
Laws: IID; CHAIN, where rho = 1 and it is the token rule.
Source: Sun et al., "SpecTr", arXiv:2310.15141, algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, TokenTree
from specdec.verifiers.base import Acceptance, TargetProbs, Verifier
from specdec.verifiers.greedy import greedy_walk
from specdec.verifiers.walk import acceptance_coins, descend_drawn, draw_correction

_MAX_ROUNDS = 30
_TOLERANCE = 1e-8
_TINY = 1e-30


class KSeqVerifier(Verifier):
    """Tests k independent draws alike with min(1, p / (rho q)) and accepts the first that passes."""

    laws = frozenset({ProposalLaw.IID, ProposalLaw.CHAIN})

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if p.all_greedy:
            return greedy_walk(tree, p)
        return descend_drawn(tree, p, rng, lambda nodes: _test_children(tree, p, rng, nodes))


def _test_children(tree: TokenTree, p: TargetProbs, rng: CounterRng, nodes: Tensor) -> tuple[Tensor, Tensor]:
    weights, q = p.rows(nodes), tree.q_of(nodes)  # [n, V]
    # p = q must pass whatever the rounding of their sums.
    q *= (weights.sum(-1, keepdim=True) / q.sum(-1, keepdim=True)).float()
    k = tree.num_children[nodes]
    rho, b = solve_rho(weights, q, k)
    line = torch.full_like(tree.tokens, -1)  # [N], which of the n nodes a node is a child of
    line[nodes] = torch.arange(len(nodes), device=nodes.device)
    line = torch.where(tree.depth > 0, line[tree.flat_parents.clamp(min=0)], -1)
    children = (line >= 0).nonzero().squeeze(1)  # [c]
    own, token = line[children], tree.tokens[children]
    coins = acceptance_coins(tree, children, rng)
    passes = coins * q[own, token].double() * rho[own] < weights[own, token].double()
    none = len(tree.tokens)
    first = torch.full_like(nodes, none).scatter_reduce_(0, own[passes], children[passes], "amin")
    rejected = first == none
    token = torch.zeros_like(nodes)
    token[rejected] = _correct(weights, q, rho, b, k, p, nodes, rejected, rng)
    return torch.where(rejected, -1, first), token


def _correct(
    weights: Tensor,
    q: Tensor,
    rho: Tensor,
    b: Tensor,
    k: Tensor,
    p: TargetProbs,
    nodes: Tensor,
    rejected: Tensor,
    rng: CounterRng,
) -> Tensor:
    weights, q, b, k = weights[rejected], q[rejected], b[rejected], k[rejected]
    passed = torch.minimum(weights / rho[rejected].float().unsqueeze(1), q)  # [n, V]
    gain = torch.where(b > 0, (1 - (1 - b) ** k) / b.clamp(min=_TINY), k.double())
    residual = (weights - passed * gain.float().unsqueeze(1)).clamp_(min=0)
    return draw_correction(residual, p, nodes[rejected], rng)


def solve_rho(p: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """rho of each row and the chance b(rho) that one draw passes.

    Args:
        p, q: `[n, V]` float32, normalised.
        k: `[n]` int64, draws of each row.

    Returns:
        rho and b, `[n]` float64; rho lies at or just above the root.
    """

    def surplus(rho: Tensor) -> tuple[Tensor, Tensor]:
        b = torch.minimum(p / rho.float().unsqueeze(1), q).sum(-1, dtype=torch.float64)
        b = b.clamp(max=1.0)
        return 1 - (1 - b) ** k - rho * b, b

    low, high = torch.ones(len(k), dtype=torch.float64, device=p.device), k.double()
    f_low, b_low = surplus(low)
    f_high, b = surplus(high)
    # One draw, or p inside q: the root is 1.
    at_one = f_low <= 0
    high, b = torch.where(at_one, low, high), torch.where(at_one, b_low, b)
    excess = torch.where(at_one, 0.0, -f_high)
    # The Illinois method: false position that halves the weight of an end that stays.
    for _ in range(_MAX_ROUNDS):
        if bool((excess <= _TOLERANCE).all()):
            break
        middle = (low * f_high - high * f_low) / (f_high - f_low).clamp(max=-_TINY)
        middle = torch.minimum(torch.maximum(middle, low), high)
        f_middle, b_middle = surplus(middle)
        is_high = f_middle <= 0
        f_high, f_low = torch.where(is_high, f_middle, f_high / 2), torch.where(is_high, f_low / 2, f_middle)
        low, high = torch.where(is_high, low, middle), torch.where(is_high, middle, high)
        b, excess = torch.where(is_high, b_middle, b), torch.where(is_high, -f_middle, excess)
    return high, b
