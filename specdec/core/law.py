"""Proposal laws: how the children of a node were chosen decides which rules verify them exactly."""

from __future__ import annotations

from enum import Enum


class ProposalLaw(Enum):
    """What a proposer promises about the children of a node, given the prefix and the node's path."""

    DETERMINISTIC = "deterministic"
    """A function of prefix and drafter state (top-k, argmax, n-gram); any pruning is legal."""
    CHAIN = "chain"
    """One draw from q per level; only truncation that does not look at the drawn token is legal."""
    IID = "iid"
    """k independent draws from q; only non-anticipating pruning is legal."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Sequential draws, q renormalised after each; draw order is child order and must be kept."""

    @property
    def needs_q(self) -> bool:
        """Whether a tree under this law must carry the distribution its children were drawn from."""
        return self is not ProposalLaw.DETERMINISTIC
