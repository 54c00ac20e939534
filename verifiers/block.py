"""Block verification: judge a drafted chain as a whole; a bad token may be made up for by the path after it.

With pi_0 = 1 and pi_i = min(1, pi_{i-1} p(x_i) / q(x_i)), the first i tokens pass with probability pi_i if they are
the whole chain, else S_i / (S_i + 1 - pi_i), S_i = sum max(pi_i p - q, 0) over the next token; the longest prefix
that passes is kept. Judging from the end, as traversal does, meets that prefix first: the two rules are one.
Guarantee: the joint law of the output equals the target's; no rule for chains accepts more in expectation.
Laws: CHAIN.
Source: Sun et al., "Block verification", arXiv:2403.10444, algorithm 2.
"""

from __future__ import annotations

from specdec.core import ProposalLaw
from specdec.verifiers.traversal import TraversalVerifier


class BlockVerifier(TraversalVerifier):
    """Accepts the longest prefix of a drawn chain that passes as a block; accepts at least what `token` does."""

    laws = frozenset({ProposalLaw.CHAIN})
