"""Entropy-gated acceptance (lossy): exact where the target is sure, lenient where many tokens would do.

A token is drawn from p; the child that carries it is kept. If none does and the entropy of p is at least `gate`
nats, the likeliest child with p(x) >= ratio * max p is kept in its place.
Guarantee: none for gate < infinity; an infinite gate is target-only verification.
Laws: any, since none is kept.
Source: relaxed acceptance as serving engines offer it (candidates within a margin of the best token), with the
entropy as the switch; the combination is ours, for study.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core import CounterRng, TokenTree
from specdec.core.checks import is_real
from specdec.verifiers.base import ALL_LAWS, Acceptance, TargetProbs, Verifier
from specdec.verifiers.walk import descend, follow_target


class EntropyGateVerifier(Verifier):
    """Accepts any likely enough child where the target's entropy is high; changes the output's distribution."""

    laws = ALL_LAWS
    lossy = True

    def __init__(self, gate: float = 1.0, ratio: float = 0.3) -> None:
        if not is_real(gate) or gate < 0:
            raise ValueError(f"gate={gate!r}: expected an entropy in nats, >= 0")
        if not is_real(ratio) or not 0 < ratio <= 1:
            raise ValueError(f"ratio={ratio!r}: expected a fraction of the largest probability in (0, 1]")
        self.gate, self.ratio = gate, ratio

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        def decide(nodes: Tensor) -> tuple[Tensor, Tensor]:
            child, token = follow_target(tree, p, rng, nodes)
            lenient = (child < 0) & (tree.first_child[nodes] >= 0)
            if bool(lenient.any()):
                child[lenient] = self._likely_child(tree, p, nodes[lenient])
            return child, token

        return descend(tree, decide)

    def _likely_child(self, tree: TokenTree, p: TargetProbs, nodes: Tensor) -> Tensor:
        """The likeliest acceptable child of each of n nodes, -1 if there is none."""
        rows = p.rows(nodes)  # [n, V]
        uncertain = -torch.special.xlogy(rows, rows).sum(-1) >= self.gate
        floor = self.ratio * rows.amax(-1)
        best, best_p = torch.full_like(nodes, -1), torch.zeros_like(floor)
        child = tree.first_child[nodes]
        while bool((child >= 0).any()):
            p_child = rows.gather(1, tree.tokens[child.clamp(min=0)].unsqueeze(1)).squeeze(1)
            better = (child >= 0) & uncertain & (p_child >= floor) & (p_child > best_p)
            best, best_p = torch.where(better, child, best), torch.where(better, p_child, best_p)
            child = torch.where(child >= 0, tree.next_sibling[child.clamp(min=0)], -1)
        return best
