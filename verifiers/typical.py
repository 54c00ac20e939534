"""Typical acceptance (lossy): keep the longest path of tokens that are not too unlikely for the target.

A node's token x passes if p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p in nats after its parent; the
deepest node whose whole path passes is kept, the first among equals. The next token is drawn from p.
Guarantee: none; the output leans towards the drafter. At temperature 0 it is greedy verification.
Laws: any, since none is kept.
Source: Medusa, arXiv:2401.10774, section 2.3.1. Medusa's code takes epsilon = 0.09 and delta = 0.3.
"""

from __future__ import annotations

import torch

from specdec.core import CounterRng, TokenTree
from specdec.core.checks import is_real
from specdec.verifiers.base import ALL_LAWS, Acceptance, TargetProbs, Verifier
from specdec.verifiers.walk import acceptance_of, deepest_accepted, draw_from_target


class TypicalVerifier(Verifier):
    """Keeps tokens with p above min(epsilon, delta exp(-entropy)); changes the output's distribution."""

    laws = ALL_LAWS
    lossy = True

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if not is_real(value) or not 0 < value <= 1:
                raise ValueError(f"{name}={value!r}: expected a probability threshold in (0, 1]")
        self.epsilon, self.delta = epsilon, delta

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        matches = torch.zeros_like(tree.tokens, dtype=torch.bool)
        drafted = (tree.depth > 0).nonzero().squeeze(1)
        if len(drafted):
            inner, line = tree.flat_parents[drafted].unique(return_inverse=True)
            rows = p.rows(inner)  # [I, V]
            entropy = -torch.special.xlogy(rows, rows).sum(-1)
            threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
            matches[drafted] = rows[line, tree.tokens[drafted]] > threshold[line]
        last = deepest_accepted(tree, matches)
        return acceptance_of(tree, last, draw_from_target(p, last, rng))
