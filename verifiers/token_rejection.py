"""Token-level rejection: accept a drafted token with probability min(1, p/q), else draw from the residual.

Guarantee: the joint law of the output equals the target's. For one draw a level, P(accept) = 1 - TV(p, q).
Laws: CHAIN, with q as drawn; DETERMINISTIC, where q is a point mass: a child is accepted with its residual
probability and leaves the residual when rejected. For any number of siblings, duplicates included, that is the same
as one draw from p, kept if it is among the children: so one coin decides, as in `target_only`.
Source: Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318.
"""

from __future__ import annotations

from specdec.core import ProposalLaw
from specdec.verifiers.recursive_rejection import RecursiveRejectionVerifier


class TokenRejectionVerifier(RecursiveRejectionVerifier):
    """Accepts with min(1, p/q) and corrects from max(p - q, 0); exact for chains and deterministic trees."""

    laws = frozenset({ProposalLaw.CHAIN, ProposalLaw.DETERMINISTIC})
