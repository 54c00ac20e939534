"""Greedy verification: keep the longest path of argmax tokens.

Guarantee: at temperature 0 the output is the target's own greedy output, up to the numerics of its logits.
Laws: any, because the rule never looks at how the tree was chosen.
Source: Stern et al., "Blockwise parallel decoding", arXiv:1811.03115; trees: SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from specdec.core import CounterRng, TokenTree
from specdec.verifiers.base import ALL_LAWS, Acceptance, TargetProbs, Verifier
from specdec.verifiers.walk import acceptance_of, deepest_accepted


class GreedyVerifier(Verifier):
    """Longest path whose tokens are the target's argmax; temperature 0 only."""

    laws = ALL_LAWS
    greedy_only = True

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        return greedy_walk(tree, p)


def greedy_walk(tree: TokenTree, p: TargetProbs) -> Acceptance:
    """Greedy acceptance of all requests, level by level in O(log depth) vectorised rounds."""
    argmax = p.argmax  # [N]
    last = deepest_accepted(tree, tree.tokens == argmax[tree.flat_parents.clamp(min=0)])
    return acceptance_of(tree, last, argmax[last])
