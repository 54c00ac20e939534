"""The verifier contract: a batched rule that keeps a path of each drafted tree and adds one token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, SamplingBatch, TokenTree
from specdec.core.logits import change_logits
from specdec.core.sampling import draw_law

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
        sampling: parameters of the B requests, with the histories that they need.
    """

    def __init__(self, logits: Tensor, tree: TokenTree, sampling: SamplingBatch) -> None:
        self.logits = logits
        """The target's own, before any change."""
        self.tree = tree
        self.sampling = sampling

    @cached_property
    def changed_logits(self) -> Tensor:
        """`[N, V]`, after bias, masks and penalties, each with prefix and path as history.

        The target's own tensor where no request asks for any.
        """
        if not self.sampling.changes_logits:
            return self.logits
        paths = self.tree.path_tokens if self.sampling.uses_history else None
        return change_logits(self.logits, self.sampling, self.tree.request_of_node, paths)

    @cached_property
    def _max(self) -> tuple[Tensor, Tensor]:
        # On 16-bit types several times faster than argmax.
        values, indices = self.changed_logits.max(-1)
        return values, indices

    @property
    def argmax(self) -> Tensor:
        """`[N]` int64, the greedy token after each node."""
        return self._max[1]

    @cached_property
    def invalid(self) -> Tensor:
        """`[N]` bool, rows that hold NaN or have no finite maximum: nothing can be drawn from them."""
        # Greedy rules need the argmax as well; for the others amax alone is faster still.
        largest = self._max[0] if self.all_greedy else self.changed_logits.amax(-1)
        return ~largest.isfinite()

    @property
    def all_greedy(self) -> bool:
        return self.sampling.all_greedy

    def rows(self, nodes: Tensor) -> Tensor:
        """p after the given nodes: `[n]` int64 to `[n, V]` float32, each row summing to 1."""
        return draw_law(self.changed_logits[nodes], self.sampling, self.tree.request_of_node[nodes])


class Verifier(ABC):
    """A verification rule. Exact rules keep the joint law of the tokens equal to the target's."""

    laws: ClassVar[frozenset[ProposalLaw]]
    """Proposal laws this rule is exact for."""
    lossy: ClassVar[bool] = False
    """The rule changes the target's distribution on purpose; reports mark it."""
    greedy_only: ClassVar[bool] = False
    """The rule serves temperature 0 alone."""
    reproduces: ClassVar[bool] = False
    """At any temperature the tokens are plain decoding's own under the same seed, not only their law, where plain
    decoding draws by this rule (`drafter="none"`)."""

    @abstractmethod
    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        """Decides for all requests at once, without a Python loop over requests.

        Args:
            tree: N nodes of B requests.
            p: the target's distributions after the nodes.
            rng: coins. ACCEPT coins are keyed by root position and node index, RESIDUAL and TARGET coins by the
                position of the token they decide and node 0: so no coin serves two decisions.
        """
