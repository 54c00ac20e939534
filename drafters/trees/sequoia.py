"""Sequoia: the tree that accepts most, by how often the i-th sibling was accepted when its turn came.

`acceptance[i]` is the measured probability that the child of rank i is the one accepted, given that its parent was:
the share of visits of a node in which that draw won. A path is then accepted with the product of its ranks' entries
and a tree is worth F = 1 + the sum over its nodes. The best tree of m nodes holds the m largest products: while the
vector does not increase, a heap finds the same optimum as the paper's dynamic programme.
The size is `num_nodes`, or that which makes a token cheapest: (depth * draft_time + verify_time[m]) / F(m, depth).
Law: WITHOUT_REPLACEMENT; a fixed shape of sibling ranks, cut to smaller budgets by value, never by token.
Needs of a drafter: next-token logits after any path.
Source: Chen et al., "Sequoia", arXiv:2402.12374, sections 3.1 and 3.3.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from specdec.core import ProposalLaw, TokenTree
from specdec.core.checks import check, check_positive, is_integer, is_real
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.draws import Draw
from specdec.drafters.trees.shapes import Path
from specdec.drafters.trees.static import grow_shapes


class SequoiaProposer(TreeProposer):
    """The shape that accepts most for a measured acceptance vector, of a given size or the best for given times.

    Args:
        acceptance: acceptance probability by sibling rank, not increasing, summing to at most 1.
        num_nodes: drafted nodes; None takes the size that makes a token cheapest.
        max_depth: levels.
        draft_time: time of one draft pass; one is made a level.
        verify_times: time of a target forward by drafted nodes, 0 for a plain step; sizes between are interpolated.
            Same unit as `draft_time`.
    """

    law = ProposalLaw.WITHOUT_REPLACEMENT

    def __init__(
        self,
        acceptance: Sequence[float] = (0.6, 0.2, 0.1),
        num_nodes: int | None = 12,
        max_depth: int = 8,
        draft_time: float | None = None,
        verify_times: Mapping[int, float] | None = None,
    ) -> None:
        _check_acceptance(acceptance)
        check_positive("max_depth", max_depth)
        if num_nodes is None:
            draft_time, verify_times = _check_times(draft_time, verify_times)
            self.paths = cheapest_shape(acceptance, max_depth, draft_time, verify_times)
        elif draft_time is not None or verify_times is not None:
            raise ValueError(
                f"num_nodes={num_nodes}: times choose the size; leave them out or set num_nodes=null"
            )
        else:
            check_positive("num_nodes", num_nodes)
            self.paths = [path for path, _ in best_paths(acceptance, num_nodes, max_depth)]
        self.max_nodes = len(self.paths)

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        # Best first, so any beginning is the best tree of its size; parents come before children.
        shapes = [
            [path for path in self.paths if len(path) <= depth][:nodes]
            for nodes, depth in zip(budget, batch.max_depths, strict=True)
        ]
        return grow_shapes(model, batch, shapes, Draw.WITHOUT_REPLACEMENT)


def best_paths(acceptance: Sequence[float], num_nodes: int, max_depth: int) -> list[tuple[Path, float]]:
    """The `num_nodes` paths of sibling ranks that are accepted most often, with their probabilities, best first.

    Equal ones come by depth, then by rank. Paths that are never accepted are left out, so there may be fewer.
    """
    paths: list[tuple[Path, float]] = []
    heap: list[tuple[float, int, Path]] = []

    def push(path: Path) -> None:
        heapq.heappush(heap, (-math.prod(acceptance[rank] for rank in path), len(path), path))

    push((0,))
    while heap and len(paths) < num_nodes:
        negated, depth, path = heapq.heappop(heap)
        if negated == 0:
            break
        paths.append((path, -negated))
        if path[-1] + 1 < len(acceptance):
            push((*path[:-1], path[-1] + 1))
        if depth < max_depth:
            push((*path, 0))
    return paths


def cheapest_shape(
    acceptance: Sequence[float], max_depth: int, draft_time: float, verify_times: Mapping[int, float]
) -> list[Path]:
    """The shape with the least time a token, among all depths and the sizes that `verify_times` spans.

    Raises:
        ValueError: plain decoding is faster than all of them.
    """
    best_cost = verify_times[0]
    best: list[Path] = []
    for depth in range(1, max_depth + 1):
        paths = best_paths(acceptance, max(verify_times), depth)
        accepted = accumulate((value for _, value in paths), initial=1.0)
        for size, tokens in enumerate(accepted):
            cost = (depth * draft_time + _interpolate(verify_times, size)) / tokens
            if size and cost < best_cost:
                best_cost, best = cost, [path for path, _ in paths[:size]]
    if not best:
        raise ValueError(
            f"draft_time={draft_time}, verify_times={dict(verify_times)}: no tree decodes faster than plain steps "
            "with this acceptance; use drafter=none or set num_nodes"
        )
    return best


def _interpolate(times: Mapping[int, float], size: int) -> float:
    """The time of a size between two measured ones."""
    if size in times:
        return times[size]
    sizes = sorted(times)
    above = bisect_left(sizes, size)
    low, high = sizes[above - 1], sizes[above]
    return times[low] + (times[high] - times[low]) * (size - low) / (high - low)


def _check_acceptance(acceptance: Sequence[float]) -> None:
    listed = isinstance(acceptance, Sequence) and not isinstance(acceptance, str) and bool(acceptance)
    valid = listed and all(is_real(share) and 0 <= share <= 1 for share in acceptance)
    check("acceptance", acceptance, valid and acceptance[0] > 0, "to list probabilities by sibling rank")
    # A measured vector may exceed 1 by rounding.
    check(
        "acceptance",
        acceptance,
        math.fsum(acceptance) < 1 + 1e-6,
        "to sum to at most 1: one child is accepted",
    )
    for rank, (before, after) in enumerate(pairwise(acceptance), start=1):
        if after > before:
            raise ValueError(
                f"acceptance[{rank}]={after} exceeds acceptance[{rank - 1}]={before}: expected a vector that never "
                "increases; measure over more steps, or cut it where it rises"
            )


def _check_times(
    draft_time: float | None, verify_times: Mapping[int, float] | None
) -> tuple[float, Mapping[int, float]]:
    if draft_time is None or verify_times is None:
        raise ValueError(
            "num_nodes=None: the size follows from draft_time and verify_times; give both, or a number"
        )
    check("draft_time", draft_time, is_real(draft_time) and 0 <= draft_time < math.inf, ">= 0")
    mapped = isinstance(verify_times, Mapping) and all(
        is_integer(size) and size >= 0 for size in verify_times
    )
    valid = mapped and all(is_real(time) and 0 < time < math.inf for time in verify_times.values())
    check("verify_times", verify_times, valid, "to map numbers of drafted nodes to times above 0")
    check("verify_times", verify_times, 0 in verify_times, "to hold 0, the time of a plain step")
    check("verify_times", verify_times, len(verify_times) > 1, "to hold a size above 0")
    return draft_time, verify_times
