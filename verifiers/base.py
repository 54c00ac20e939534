"""The verifier contract: a batched rule that keeps a path of each drafted tree and adds one token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, SamplingBatch, Stream, TokenTree
from specdec.core.sampling import sample, warp

ALL_LAWS = frozenset(ProposalLaw)


@dataclass(frozen=True, kw_only=True, eq=False)
class Acceptance:
    """What a verifier decided for the B requests of a tree."""

    path: Tensor
    """`[B, D]` int64, accepted nodes in depth order as flat node indices, the root excluded; -1 pads."""
    num_accepted: Tensor
    """`[B]` int64, accepted drafted tokens."""
    next_token: Tensor
    """`[B]` int64, the token that follows: a correction after a rejection, else the bonus token."""


class TargetProbs:
    """The target's distribution after each node of a tree, warped on demand.

    Warping takes several passes over the vocabulary and a rule visits few nodes: it asks for rows it needs.

    Args:
        logits: `[N, V]`, any float dtype; row n follows node n.
        tree: the tree of N nodes.
        sampling: parameters of the B requests.
    """

    def __init__(self, logits: Tensor, tree: TokenTree, sampling: SamplingBatch) -> None:
        self.logits = logits
        self.tree = tree
        self.sampling = sampling

    @cached_property
    def _max(self) -> tuple[Tensor, Tensor]:
        values, indices = self.logits.max(-1)
        return values, indices

    @property
    def argmax(self) -> Tensor:
        """`[N]` int64, the greedy token after each node."""
        return self._max[1]

    @cached_property
    def invalid(self) -> Tensor:
        """`[N]` bool, rows that hold NaN or have no finite maximum: nothing can be drawn from them."""
        return ~self._max[0].isfinite()

    @property
    def all_greedy(self) -> bool:
        return self.sampling.all_greedy

    def rows(self, nodes: Tensor) -> Tensor:
        """p after the given nodes: `[n]` int64 to `[n, V]` float32, each row summing to 1."""
        return warp(self.logits[nodes], self.sampling, self.tree.request_of_node[nodes])


class Verifier(ABC):
    """A verification rule. Exact rules keep the joint law of the tokens equal to the target's."""

    laws: ClassVar[frozenset[ProposalLaw]]
    """Proposal laws this rule is exact for."""
    lossy: ClassVar[bool] = False
    """The rule changes the target's distribution on purpose; reports mark it."""
    greedy_only: ClassVar[bool] = False
    """The rule serves temperature 0 alone."""
    reproduces: ClassVar[bool] = False
    """At any temperature the tokens are plain decoding's own under the same seed, not only their law."""

    @abstractmethod
    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        """Decides for all requests at once, without a Python loop over requests.

        Args:
            tree: N nodes of B requests.
            p: the target's distributions after the nodes.
            rng: coins, keyed by request row, position, node and stream.
        """


def acceptance_of(tree: TokenTree, last: Tensor, next_token: Tensor) -> Acceptance:
    """Acceptance of the path from the root to a node.

    Args:
        tree: N nodes of B requests.
        last: `[B]` int64, flat index of the deepest accepted node; the root if nothing was accepted.
        next_token: `[B]` int64.
    """
    request, depth = tree.request_of_node, tree.depth
    if tree.max_depth == 0:
        empty = torch.empty(tree.batch_size, 0, dtype=torch.int64, device=last.device)
        return Acceptance(path=empty, num_accepted=torch.zeros_like(last), next_token=next_token)
    nodes = torch.arange(len(depth), device=depth.device)
    on_path = tree.ancestor_mask[last[request], tree.index_in_request]  # [N]
    width = tree.max_depth + 1
    path = torch.full((tree.batch_size * width,), -1, dtype=torch.int64, device=depth.device)
    path.scatter_reduce_(0, request * width + depth, torch.where(on_path, nodes, -1), "amax")
    path = path.view(tree.batch_size, width)[:, 1:]  # [B, D]
    return Acceptance(path=path, num_accepted=depth[last], next_token=next_token)


def find_child(tree: TokenTree, nodes: Tensor, tokens: Tensor) -> Tensor:
    """The child of each request's node that carries a token.

    Args:
        tree: N nodes of B requests.
        nodes: `[B]` int64, flat node of each request.
        tokens: `[B]` int64.

    Returns:
        `[B]` int64, the first such child's flat index; -1 if there is none.
    """
    request, count = tree.request_of_node, len(tree.tokens)
    matches = (tree.flat_parents == nodes[request]) & (tree.tokens == tokens[request])  # [N]
    candidates = torch.where(matches, torch.arange(count, device=nodes.device), count)
    child = torch.full_like(nodes, count).scatter_reduce_(0, request, candidates, "amin")
    return torch.where(child == count, -1, child)


def draw_from_target(p: TargetProbs, nodes: Tensor, rng: CounterRng) -> Tensor:
    """Draws the token that follows each of n nodes from p.

    The coin depends on the position alone, so a request that visits a position draws the same token there
    whatever was drafted. Args and return are `[n]` int64.
    """
    requests = p.tree.request_of_node[nodes]
    positions = p.tree.positions[nodes] + 1
    coins = rng.uniform(requests, positions, torch.zeros_like(positions), Stream.TARGET)
    return sample(p.rows(nodes), coins)
