"""Gumbel-coupled verification: every token of the vocabulary runs a race, and the target's winner is the output.

Each token i has a coin u_i keyed by seed and position; the winner is argmin -log(u_i) / p_i, which is i with
probability p_i (the Gumbel-max trick as an exponential race). The tree is followed while it holds the winners.
Guarantee: exact for any tree, and the tokens depend on seed and prefix alone: the same with and without
speculation, whatever the drafter. A chain that draws by the same coins (tree.args.coupled=true) has the target's
winner with probability at least (1 - TV) / (1 + TV).
Laws: any.
Source: Daliri et al., "Coupling without communication", arXiv:2408.07978; drafter invariance: arXiv:2506.05632.
Coins have 32 bits: a token of probability below 2**-33 hardly ever wins.
"""

from __future__ import annotations

from torch import Tensor

from specdec.core import CounterRng, TokenTree
from specdec.core.sampling import race
from specdec.verifiers.base import ALL_LAWS, Acceptance, TargetProbs, Verifier
from specdec.verifiers.greedy import greedy_walk
from specdec.verifiers.walk import descend, find_child


class GumbelVerifier(Verifier):
    """Draws each token by a race that only seed and position decide; same tokens whatever the drafter."""

    laws = ALL_LAWS
    reproduces = True

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if p.all_greedy:
            return greedy_walk(tree, p)

        def decide(nodes: Tensor) -> tuple[Tensor, Tensor]:
            rows = p.rows(nodes)  # [n, V]
            coins = rng.race(tree.request_of_node[nodes], tree.positions[nodes] + 1, rows.shape[1])
            token = race(rows, coins)
            return find_child(tree, nodes, token), token

        return descend(tree, decide)
