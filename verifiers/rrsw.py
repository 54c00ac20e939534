"""Recursive rejection sampling without replacement (RRSw): a rejected token leaves q as well.

Guarantee: the joint law of the output equals the target's; k children cover q better than k draws with
replacement, and where q has k tokens of support all of p's mass on them is covered.
Laws: WITHOUT_REPLACEMENT, children in the order they were drawn; CHAIN, where it is the token rule.
Source: Jeon et al., "Recursive speculative decoding", arXiv:2402.14160; Sequoia, arXiv:2402.12374, algorithm 2.
"""

from __future__ import annotations

from specdec.core import ProposalLaw
from specdec.verifiers.recursive_rejection import RecursiveRejectionVerifier


class RecursiveRejectionWithoutReplacementVerifier(RecursiveRejectionVerifier):
    """Tries children drawn without replacement in draw order; a rejected token leaves p and q."""

    laws = frozenset({ProposalLaw.WITHOUT_REPLACEMENT, ProposalLaw.CHAIN})
