"""Static tree: a fixed shape given by sibling ranks, the same at every step.

Law: that of `draw`, see `draws.py`. A drawn shape has no gaps among siblings, and a smaller budget cuts it by rank,
never by token.
Needs of a drafter: next-token logits after any path.
Source: Medusa, arXiv:2401.10774, section 2.1.2; published shapes by name in `shapes.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specdec.core import TokenTree
from specdec.core.checks import are_integers, check
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.builder import TreeBuilder
from specdec.drafters.trees.draws import Draw, add_children
from specdec.drafters.trees.shapes import SHAPES, Path


class StaticProposer(TreeProposer):
    """A fixed tree of top-k or drawn children, given as paths of sibling ranks or as the name of a shape."""

    possible_laws = tuple(draw.law for draw in Draw)

    def __init__(self, paths: Sequence[Sequence[int]] | str = "default", draw: str = "top_k") -> None:
        self.draw = Draw.parse(draw)
        self.law = self.draw.law
        self.paths = _parse(paths)
        if self.draw is not Draw.TOP_K:
            _check_gaps(self.paths, draw)
        self.max_nodes = len(self.paths)

    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        # A smaller budget takes the first paths, which are closed under parents.
        wanted = [
            [path for path in self.paths if len(path) <= depth][:nodes]
            for nodes, depth in zip(budget, batch.max_depths, strict=True)
        ]
        return grow_shapes(model, batch, wanted, self.draw)


def grow_shapes(
    model: DraftModel, batch: DraftBatch, shapes: Sequence[Sequence[Path]], draw: Draw
) -> TokenTree:
    """Grows one tree of a given shape for each request.

    Args:
        model: what to expand with.
        batch: B requests.
        shapes: B shapes, closed under parents; the subtree of a child that doesn't exist is left out.
        draw: how children are chosen.
    """
    builder = TreeBuilder(batch, max(map(len, shapes)))
    node_of: list[dict[Path, int]] = [{(): 0} for _ in shapes]
    # Children by parent, so that each level is one pass over the shape.
    children = [_children(shape) for shape in shapes]
    while sources := [
        (row, path) for row, known in enumerate(node_of) for path in known if path in children[row]
    ]:
        ranks = [children[row].pop(path) for row, path in sources]
        frontier = builder.frontier(
            [row for row, _ in sources], [node_of[row][path] for row, path in sources]
        )
        grown = add_children(model, frontier, ranks, draw)
        for (row, path), own, nodes in zip(sources, ranks, grown, strict=True):
            node_of[row].update(((*path, rank), node) for rank, node in zip(own, nodes, strict=False))
    return builder.build(draw.law)


def _children(shape: Sequence[Path]) -> dict[Path, list[int]]:
    """The ranks below each inner path, ascending."""
    children: dict[Path, list[int]] = {}
    for path in shape:
        children.setdefault(path[:-1], []).append(path[-1])
    return {path: sorted(ranks) for path, ranks in children.items()}


def _parse(paths: Sequence[Sequence[int]] | str) -> list[Path]:
    if isinstance(paths, str):
        if paths not in SHAPES:
            raise ValueError(f"paths={paths!r}: expected a list of paths or one of {', '.join(SHAPES)}")
        paths = SHAPES[paths]
    listed = isinstance(paths, Collection) and all(map(are_integers, paths))
    check("paths", paths, listed, "to list paths of sibling ranks, such as [[0], [1], [0, 0]]")
    parsed = {tuple(path) for path in paths}
    _check(sorted(parsed))
    # Parents and earlier siblings have smaller sums: likely paths first, whatever their depth.
    return sorted(parsed, key=lambda path: (sum(path) + len(path), path))


def _check(paths: list[Path]) -> None:
    if not paths or min(len(path) for path in paths) < 1:
        raise ValueError(f"paths={paths}: expected at least one path, none of them empty")
    known = {(), *paths}
    for path in paths:
        if min(path) < 0:
            raise ValueError(f"paths: {list(path)} holds a negative sibling rank; ranks count from 0")
        if path[:-1] not in known:
            raise ValueError(f"paths: {list(path)} has no parent; add {list(path[:-1])}")


def _check_gaps(paths: list[Path], draw: str) -> None:
    for path in paths:
        before = (*path[:-1], path[-1] - 1)
        if path[-1] and before not in paths:
            raise ValueError(
                f"paths: {list(path)} skips a sibling; with draw={draw} add {list(before)}, for ranks are draws"
            )
