"""Walking down a batch of trees: what most rules share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, Stream, TokenTree
from specdec.core.sampling import sample
from specdec.verifiers.base import Acceptance, TargetProbs

Decision = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Given n nodes of n requests, the accepted child of each, -1 if none, and the token that follows instead; both
`[n]` int64. The token means something only where no child was accepted."""


def descend(tree: TokenTree, decide: Decision) -> Acceptance:
    """Goes down from all roots, a level at a time, until no request has an accepted child."""
    current = tree.roots.clone()  # [B]
    next_token = torch.zeros_like(current)
    active = torch.arange(tree.batch_size, device=current.device)
    while len(active):
        child, token = decide(current[active])
        next_token[active] = token
        active, child = active[child >= 0], child[child >= 0]
        current[active] = child
    return acceptance_of(tree, current, next_token)


def descend_drawn(tree: TokenTree, p: TargetProbs, rng: CounterRng, decide: Decision) -> Acceptance:
    """Goes down with a rule for drawn children.

    `decide` sees only nodes that have drawn children. The others follow the target: leaves get their bonus token,
    and for children that are point masses following the target is the rejection rule.
    """

    def decide_all(nodes: Tensor) -> tuple[Tensor, Tensor]:
        drawn = tree.has_drawn_children[nodes]
        child, token = torch.empty_like(nodes), torch.empty_like(nodes)
        if bool(drawn.any()):
            child[drawn], token[drawn] = decide(nodes[drawn])
        if not bool(drawn.all()):
            child[~drawn], token[~drawn] = follow_target(tree, p, rng, nodes[~drawn])
        return child, token

    return descend(tree, decide_all)


def drawn_without_replacement(tree: TokenTree) -> Tensor:
    """`[B]` bool, whether a request's siblings were drawn without replacement."""
    laws = [law is ProposalLaw.WITHOUT_REPLACEMENT for law in tree.laws]
    return torch.tensor(laws, device=tree.tokens.device)


def follow_target(tree: TokenTree, p: TargetProbs, rng: CounterRng, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """A `Decision`: draws from the target, and accepts the child that carries the token."""
    token = draw_from_target(p, nodes, rng)
    return find_child(tree, nodes, token), token


def draw_from_target(p: TargetProbs, nodes: Tensor, rng: CounterRng) -> Tensor:
    """Draws the token that follows each of n nodes from p.

    The coin depends on the position alone, so a request that visits a position draws the same token there
    whatever was drafted. Args and return are `[n]` int64.
    """
    return _draw(p.rows(nodes), p.tree, nodes, rng, Stream.TARGET)


def draw_correction(residual: Tensor, p: TargetProbs, nodes: Tensor, rng: CounterRng) -> Tensor:
    """Draws the token that follows each of n nodes after a rejection.

    Args:
        residual: `[n, V]` float32, need not be normalised. A row without mass, as rounding leaves where p = q,
            is drawn from p, which is then the right law; such rows are overwritten.
        p: the target's distributions.
        nodes: `[n]` int64.
        rng: coins.

    Returns:
        `[n]` int64.
    """
    empty = residual.sum(-1) <= 0
    if bool(empty.any()):
        residual[empty] = p.rows(nodes[empty])
    return _draw(residual, p.tree, nodes, rng, Stream.RESIDUAL)


def acceptance_coins(tree: TokenTree, nodes: Tensor, rng: CounterRng) -> Tensor:
    """The ACCEPT coins of n drafted nodes, `[n]` float64."""
    requests = tree.request_of_node[nodes]
    return rng.uniform(requests, tree.root_positions[requests], tree.index_in_request[nodes], Stream.ACCEPT)


def find_child(tree: TokenTree, nodes: Tensor, tokens: Tensor) -> Tensor:
    """The first child of each node that carries a token.

    Args:
        tree: N nodes of B requests.
        nodes: `[n]` int64, at most one of each request.
        tokens: `[n]` int64.

    Returns:
        `[n]` int64, the child's flat index; -1 if there is none.
    """
    count, requests = len(tree.tokens), tree.request_of_node[nodes]
    parent, token = torch.full_like(tree.roots, -2), torch.full_like(tree.roots, -1)  # [B]
    parent[requests], token[requests] = nodes, tokens
    request = tree.request_of_node
    matches = (tree.flat_parents == parent[request]) & (tree.tokens == token[request])  # [N]
    candidates = torch.where(matches, torch.arange(count, device=nodes.device), count)
    child = torch.full_like(tree.roots, count).scatter_reduce_(0, request, candidates, "amin")[requests]
    return torch.where(child == count, -1, child)


def deepest_accepted(tree: TokenTree, matches: Tensor) -> Tensor:
    """The deepest node whose whole path matches; the first among equally deep ones.

    Args:
        tree: N nodes of B requests.
        matches: `[N]` bool, whether a node would be accepted if its parent is; ignored for roots.

    Returns:
        `[B]` int64, flat index.
    """
    if tree.max_depth == 0:
        return tree.roots
    count, is_root = len(tree.tokens), tree.parents < 0
    index = torch.arange(count, device=matches.device)
    parent = torch.where(is_root, index, tree.flat_parents)
    accepted = is_root | matches
    # Pointer doubling: a node is accepted if it and all its ancestors match.
    for _ in range(tree.max_depth.bit_length()):
        accepted = accepted & accepted[parent]
        parent = parent[parent]
    key = torch.where(accepted, tree.depth * count + (count - 1 - index), -1)
    best = torch.full_like(tree.roots, -1).scatter_reduce_(0, tree.request_of_node, key, "amax")
    return count - 1 - best % count


def acceptance_of(tree: TokenTree, last: Tensor, next_token: Tensor) -> Acceptance:
    """Acceptance of the path from the root to a node.

    Args:
        tree: N nodes of B requests.
        last: `[B]` int64, flat index of the deepest accepted node; the root if nothing was accepted.
        next_token: `[B]` int64.
    """
    return Acceptance(path=tree.path_nodes[last], num_accepted=tree.depth[last], next_token=next_token)


def _draw(weights: Tensor, tree: TokenTree, nodes: Tensor, rng: CounterRng, stream: Stream) -> Tensor:
    positions = tree.positions[nodes] + 1
    coins = rng.uniform(tree.request_of_node[nodes], positions, torch.zeros_like(positions), stream)
    return sample(weights, coins)
