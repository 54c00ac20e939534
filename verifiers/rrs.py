"""Recursive rejection sampling (RRS): children drawn with replacement, each tried against what is left of p.

Guarantee: the joint law of the output equals the target's. The first child is accepted with probability
1 - TV(p, q), the next against the residual max(p - q, 0) with the same q.
Laws: IID; CHAIN, where it is the token rule.
Source: SpecInfer's multi-step speculative sampling, arXiv:2305.09781, algorithm 2.
"""

from __future__ import annotations

from specdec.core import ProposalLaw
from specdec.verifiers.recursive_rejection import RecursiveRejectionVerifier


class RecursiveRejectionWithReplacementVerifier(RecursiveRejectionVerifier):
    """Tries children drawn with replacement in turn, each against the residual the others left."""

    laws = frozenset({ProposalLaw.IID, ProposalLaw.CHAIN})
