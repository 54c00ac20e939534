"""Early exit: the target's first E layers, its final norm and its head draft for the whole target.

The first E layers of draft and target are the same function, so their K/V is the same too: the drafter reads
and writes the target's own pages. It needs no cache, no prefill and no state; verification writes the drafted
nodes' K/V again, in all layers, before anything else reads them.
Source: Draft & Verify, arXiv:2309.08168; LayerSkip, arXiv:2404.16710.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from specdec.core.checks import is_integer
from specdec.drafters.base import DrafterContext, DraftModel
from specdec.drafters.models.frontier import frontier_nodes
from specdec.drafters.trees.builder import Frontier
from specdec.engine.model_runner import ModelRunner
from specdec.engine.packing import pack


class EarlyExitModel(DraftModel):
    """The target's own first layers with its final norm and head; no extra weights, no extra cache."""

    def __init__(self, target: ModelRunner, num_layers: int) -> None:
        self.target = target
        self.num_layers = num_layers

    @classmethod
    def build(cls, context: DrafterContext, num_layers: int | None = None) -> Self:  # type: ignore[override]
        depth = context.target.model.num_layers
        chosen = max(1, depth // 3) if num_layers is None else num_layers
        if not is_integer(chosen) or not 1 <= chosen <= depth:
            raise ValueError(
                f"num_layers={num_layers!r}: the target has {depth} layers, expected 1 to {depth}"
            )
        return cls(context.target, chosen)

    def expand(self, frontier: Frontier) -> Tensor:
        nodes, positions, tables = frontier_nodes(frontier)
        batch = pack(nodes, positions, tables, self.target.block_size)
        return self.target.node_logits(batch, num_layers=self.num_layers)
