"""Target-only verification: walk the tree with tokens drawn from the target.

Guarantee: exact for any tree, duplicates and pruning included, because the tree never influences a draw; a
level is accepted with probability p(children). With the coin keyed by position the tokens are even the same
as plain decoding's under the same seed.
Laws: any; the natural rule for deterministic trees (n-gram, top-k, DDTree).
Source: SpecExec, arXiv:2406.02532; equal to EAGLE's rule for top-k trees, arXiv:2401.15077.
"""

from __future__ import annotations

from specdec.core import CounterRng, TokenTree
from specdec.verifiers.base import ALL_LAWS, Acceptance, TargetProbs, Verifier
from specdec.verifiers.greedy import greedy_walk
from specdec.verifiers.walk import descend, follow_target


class TargetOnlyVerifier(Verifier):
    """Draws from the target and follows the tree while the drawn token is a child; exact for any tree."""

    laws = ALL_LAWS
    reproduces = True

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if p.all_greedy:
            return greedy_walk(tree, p)
        return descend(tree, lambda nodes: follow_target(tree, p, rng, nodes))
