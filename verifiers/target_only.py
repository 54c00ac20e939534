"""Target-only verification: walk the tree with tokens drawn from the target.

Guarantee: exact for any tree, duplicates and pruning included, because the tree never influences a draw; a
level is accepted with probability p(children). With the coin keyed by position the tokens are even the same
as plain decoding's under the same seed.
Laws: any; the natural rule for deterministic trees (n-gram, top-k, DDTree).
Source: SpecExec, arXiv:2406.02532; equal to EAGLE's rule for top-k trees, arXiv:2401.15077.
"""

from __future__ import annotations

import torch

from specdec.core import CounterRng, TokenTree
from specdec.verifiers.base import (
    ALL_LAWS,
    Acceptance,
    TargetProbs,
    Verifier,
    acceptance_of,
    draw_from_target,
    find_child,
)
from specdec.verifiers.greedy import greedy_walk


class TargetOnlyVerifier(Verifier):
    """Draws from the target and follows the tree while the drawn token is a child; exact for any tree."""

    laws = ALL_LAWS
    reproduces = True

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if p.all_greedy:
            return greedy_walk(tree, p)
        current = tree.roots.clone()  # [B]
        next_token = torch.zeros_like(current)
        active = torch.arange(tree.batch_size, device=current.device)
        while len(active):
            next_token[active] = draw_from_target(p, current[active], rng)
            child = find_child(tree, current, next_token)[active]
            active, child = active[child >= 0], child[child >= 0]
            current[active] = child
        return acceptance_of(tree, current, next_token)
