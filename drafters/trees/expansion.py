"""Expansion list <k1, ..., km>: every node of level i - 1 gets k_i children.

Law: that of `draw`, see `draws.py`.
Needs of a drafter: next-token logits after any path.
Source: SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from specdec.core.checks import are_integers
from specdec.drafters.trees.static import StaticProposer


class ExpansionProposer(StaticProposer):
    """A full tree with `sizes[i]` children of every node of level i, top-k or drawn."""

    def __init__(self, sizes: Sequence[int] = (1, 1, 3, 1), draw: str = "top_k") -> None:
        if not are_integers(sizes) or not sizes or min(sizes) < 1:
            raise ValueError(f"sizes={sizes!r}: expected a list of numbers of children, each at least 1")
        levels = [range(size) for size in sizes]
        super().__init__(
            [path for depth in range(len(levels)) for path in product(*levels[: depth + 1])], draw
        )
