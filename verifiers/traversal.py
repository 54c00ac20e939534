"""Traversal verification: from the leaves up, so that a path is judged as a whole before its first token is.

A path is accepted with probability acc(leaf), where acc(root) = 1 and acc(c) = min(1, acc(v) P_v(c) / Q_v(c)). The
leftmost leaf is tried first. A rejected leaf leaves the tree, and its parent v inherits the rest: with
R = max(acc(v) P_v - Q_v, 0) and S = sum R, acc(v) becomes S / (S + 1 - acc(v)) and P_v becomes R / S; without
replacement Q_v loses the token. So leaves are tried in post-order; a root always passes.
As p <= 1, acc grows by 1 / Q_v(c) at most on the way to c, which q alone tells. A subtree whose coins are all too
high even so is rejected at once: p is computed only where a path may still pass.
Guarantee: the joint law of the output equals the target's; on a chain it is block verification.
Laws: CHAIN, IID, WITHOUT_REPLACEMENT (children in draw order).
Source: Weng et al., "Traversal verification", arXiv:2505.12398; block verification: arXiv:2403.10444. The form for
draws with replacement is ours; tests/exact enumerates all three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, TokenTree
from specdec.verifiers.base import Acceptance, TargetProbs, Verifier
from specdec.verifiers.greedy import greedy_walk
from specdec.verifiers.walk import (
    acceptance_coins,
    acceptance_of,
    draw_correction,
    draw_from_target,
    drawn_without_replacement,
)

# Below every acc, so that a root is never rejected.
_SURE = -1.0


class TraversalVerifier(Verifier):
    """Tries leaves from left to right and goes up on rejection; on trees it accepts more than RRSw."""

    laws = frozenset({ProposalLaw.CHAIN, ProposalLaw.IID, ProposalLaw.WITHOUT_REPLACEMENT})

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if p.all_greedy:
            return greedy_walk(tree, p)
        traversal = _Traversal(tree, p)
        last = traversal.run(_post_order_coins(tree, rng))
        return acceptance_of(tree, last, traversal.draw_next(last, rng))


class _Traversal:
    """The state of a traversal: what is left of p, and acc along the current paths."""

    def __init__(self, tree: TokenTree, p: TargetProbs) -> None:
        self.tree, self.p = tree, p
        device, count = tree.tokens.device, len(tree.tokens)
        self.parent = tree.flat_parents.clamp(min=0)
        self.removes = drawn_without_replacement(tree)  # [B]
        # The child each node tries next; -1 if none is left.
        self.child = tree.first_child.clone()  # [N]
        self.rejected = torch.zeros(count, dtype=torch.bool, device=device)
        self.lost_child = torch.zeros_like(self.rejected)
        # What is left of p after each inner node, not normalised, filled when a path reaches it.
        self.row = tree.has_drawn_children.long().cumsum(0) - 1  # [N]
        num_inner = int(tree.has_drawn_children.sum())
        self.weights = torch.empty(num_inner, p.logits.shape[-1], device=device)  # [I, V]
        # p / q of each node's token given its parent, and acc of the nodes on the current paths.
        self.ratio = torch.ones(count, dtype=torch.float64, device=device)  # [N]
        self.acc = torch.ones(count, dtype=torch.float64, device=device)  # [N]

    def run(self, coins: Tensor) -> Tensor:
        """Goes through all trees, every request doing one thing a round: it descends, rejects a node, or ends.

        Args:
            coins: `[N]` float64, -1 for roots.

        Returns:
            `[B]` int64, the deepest accepted node of each request.
        """
        tree = self.tree
        need, need_from = _needed_acc(tree, coins)
        current = tree.roots.clone()  # [B]
        self._load(tree.roots[tree.has_drawn_children[tree.roots]])
        active = torch.arange(tree.batch_size, device=current.device)
        while len(active):
            node = current[active]
            child = self.child[node]
            acc = (self.acc[node] * self.ratio[child]).clamp(max=1.0)
            dead = torch.where(child >= 0, need_from[child], coins[node]) >= self.acc[node]
            tries = (child >= 0) & ~dead
            descends = tries & (need[child] < acc)
            rejects = dead | (tries & ~descends)
            self.acc[child[descends]] = acc[descends]
            current[active[descends]] = child[descends]
            self._load(child[descends & tree.has_drawn_children[child]])
            victim = torch.where(dead, node, child)[rejects]
            current[active[rejects]] = self.parent[victim]
            self._reject(victim)
            active = active[descends | rejects]
        return current

    def draw_next(self, last: Tensor, rng: CounterRng) -> Tensor:
        """The token after each request's last node, `[B]` int64."""
        token = torch.empty_like(last)
        partial = self.lost_child[last]
        if not bool(partial.all()):
            token[~partial] = draw_from_target(self.p, last[~partial], rng)
        if bool(partial.any()):
            nodes = last[partial]
            token[partial] = draw_correction(self.weights[self.row[nodes]], self.p, nodes, rng)
        return token

    def _load(self, nodes: Tensor) -> None:
        """Computes p at n inner nodes, and p / q of their children."""
        if len(nodes):
            weights, q = self.p.rows(nodes), self.tree.q_of(nodes)  # [n, V]
            self.weights[self.row[nodes]] = weights
            self._update_ratios(nodes, weights.sum(-1), q, q.sum(-1))

    def _reject(self, nodes: Tensor) -> None:
        """Takes n rejected nodes, and all below them, out of the tree."""
        if not len(nodes):
            return
        tree, parent = self.tree, self.parent[nodes]
        weights, q = self.weights[self.row[parent]], self._q(parent)  # [n, V]
        acc = self.acc[parent]  # [n]
        p_scale, q_scale = (acc / weights.sum(-1)).float(), q.sum(-1).reciprocal()
        rest = (weights * p_scale.unsqueeze(1)).sub_(q * q_scale.unsqueeze(1)).clamp_(min=0)
        mass = rest.sum(-1)
        some = mass > 0
        # An empty rest leaves p as it is: where p = q the parent passes for certain and goes on with p; else its
        # acc is 0 and what goes on with p is never reached.
        self.acc[parent] = torch.where(some, mass / (mass + 1 - acc), (acc >= 1).double())
        self.weights[self.row[parent[some]]] = rest[some]
        self.lost_child[parent] = True
        self.rejected[nodes] = True
        self.child[parent] = tree.next_sibling[nodes]
        removes = self.removes[tree.request_of_node[nodes]]
        q[removes, tree.tokens[nodes[removes]]] = 0
        self._update_ratios(parent, torch.where(some, mass, weights.sum(-1)), q, q.sum(-1))

    def _q(self, nodes: Tensor) -> Tensor:
        """What is left of q at n inner nodes, `[n, V]` float32, not normalised."""
        tree = self.tree
        q = tree.q_of(nodes)
        line = self._line(nodes)
        gone = self.rejected & self.removes[tree.request_of_node] & (line[self.parent] >= 0)
        q[line[self.parent[gone]], tree.tokens[gone]] = 0
        return q

    def _update_ratios(self, nodes: Tensor, p_mass: Tensor, q: Tensor, q_mass: Tensor) -> None:
        """Sets p / q of the children of n inner nodes, given q `[n, V]` and the sums of p and q, `[n]`."""
        tree = self.tree
        line = self._line(nodes)
        children = ((line[self.parent] >= 0) & (tree.depth > 0)).nonzero().squeeze(1)
        own, token = line[self.parent[children]], tree.tokens[children]
        p = self.weights[self.row[nodes[own]], token]
        # Both are divided by their sums, so that p = q gives exactly 1.
        numerator, denominator = p.double() * q_mass[own], q[own, token].double() * p_mass[own]
        self.ratio[children] = torch.where(numerator > 0, numerator / denominator, 0.0)

    def _line(self, nodes: Tensor) -> Tensor:
        """`[N]` int64, which of n nodes a node is; -1 for the others."""
        line = torch.full_like(self.row, -1)
        line[nodes] = torch.arange(len(nodes), device=nodes.device)
        return line


def _post_order_coins(tree: TokenTree, rng: CounterRng) -> Tensor:
    """`[N]` float64, the coin of each node, asked for in the order that decisions may need them."""
    order: list[int] = []
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.flat_parents.tolist()):
        if parent >= 0:
            children[parent].append(node)
    # Parents before children, right siblings first; reversed it is post-order.
    stack = tree.host_offsets[:-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children[node]
    nodes = torch.tensor(order[::-1], device=tree.tokens.device)
    nodes = nodes[tree.depth[nodes] > 0]
    coins = torch.full((len(order),), _SURE, dtype=torch.float64, device=nodes.device)
    coins[nodes] = acceptance_coins(tree, nodes, rng)
    return coins


def _needed_acc(tree: TokenTree, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Above which acc anything can still pass, `[N]` float64 each.

    Returns:
        For each node, the acc of the node that lets something in its subtree pass, the node included; and the acc
        of its parent that lets something pass of what is tried from the node on: its subtree, those of its next
        siblings, and the parent itself.
    """
    own, parents = coins.tolist(), tree.flat_parents.tolist()
    first, following = tree.first_child.tolist(), tree.next_sibling.tolist()
    q = _q_of_tokens(tree).tolist()
    need, need_from = list(own), list(own)
    # Children and next siblings come later in the order of nodes.
    for node in range(len(own) - 1, -1, -1):
        if first[node] >= 0:
            need[node] = min(own[node], need_from[first[node]])
        if parents[node] >= 0:
            rest = need_from[following[node]] if following[node] >= 0 else own[parents[node]]
            need_from[node] = min(need[node] * q[node], rest)
    return coins.new_tensor(need), coins.new_tensor(need_from)


def _q_of_tokens(tree: TokenTree) -> Tensor:
    """`[N]` float64, at most the q that each node's token is judged by; 0 where that is unknown."""
    if tree.q is None or tree.q_row is None:
        return torch.zeros(len(tree.tokens), dtype=torch.float64, device=tree.tokens.device)
    row = tree.q_row[tree.flat_parents.clamp(min=0)]
    q = torch.where(row >= 0, tree.q[row.clamp(min=0), tree.tokens], 0.0)
    # A row may sum to a little more than 1, and what tokens drawn before have lost only makes q larger.
    return q.double() * (1 - 1e-5)
