"""Greedy verification: keep the longest path of argmax tokens.

Guarantee: at temperature 0 the output is the target's own greedy output, up to the numerics of its logits.
Laws: any, because the rule never looks at how the tree was chosen.
Source: Stern et al., "Blockwise parallel decoding", arXiv:1811.03115; trees: SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

import torch

from specdec.core import CounterRng, TokenTree
from specdec.verifiers.base import ALL_LAWS, Acceptance, TargetProbs, Verifier, acceptance_of


class GreedyVerifier(Verifier):
    """Longest path whose tokens are the target's argmax; temperature 0 only."""

    laws = ALL_LAWS
    greedy_only = True

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        return greedy_walk(tree, p)


def greedy_walk(tree: TokenTree, p: TargetProbs) -> Acceptance:
    """Greedy acceptance of all requests, level by level in O(log depth) vectorised rounds."""
    argmax = p.argmax  # [N]
    if tree.max_depth == 0:
        return acceptance_of(tree, tree.roots, argmax[tree.roots])
    is_root = tree.parents < 0
    parent = torch.where(is_root, torch.arange(len(argmax), device=argmax.device), tree.flat_parents)
    accepted = is_root | (tree.tokens == argmax[parent])
    # Pointer doubling: a node is accepted if it and all its ancestors match.
    for _ in range(tree.max_depth.bit_length()):
        accepted = accepted & accepted[parent]
        parent = parent[parent]
    # Deepest accepted node of each request; among duplicate siblings the first.
    count = len(argmax)
    index = torch.arange(count, device=argmax.device)
    key = torch.where(accepted, tree.depth * count + (count - 1 - index), -1)
    best = torch.full_like(tree.roots, -1).scatter_reduce_(0, tree.request_of_node, key, "amax")
    last = count - 1 - best % count
    return acceptance_of(tree, last, argmax[last])
