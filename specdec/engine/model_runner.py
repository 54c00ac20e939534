"""A model on its own paged cache: the target, and every autoregressive draft model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core import TokenTree
from specdec.engine.packing import PackedBatch, TreeNodes, pack
from specdec.kernels.paged_kv.op import compact_kv
from specdec.models.target import ForwardOutput, TargetModel


class ModelRunner:
    """Runs packed batches of one model over one K/V pool.

    Args:
        model: the model; the pool takes its dtype and device.
        num_blocks: pages of the pool.
        block_size: tokens a page.
        kv: pool shared with another runner (early exit reads the target's); None makes an own one.
    """

    def __init__(
        self, model: TargetModel, num_blocks: int, block_size: int, kv: Tensor | None = None
    ) -> None:
        self.model = model
        self.num_blocks = num_blocks
        self.block_size = block_size
        spec = model.kv_spec
        shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.kv = torch.zeros(shape, dtype=spec.dtype, device=model.device) if kv is None else kv

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def kv_bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()

    def run(
        self, batch: PackedBatch, *, num_layers: int | None = None, taps: Sequence[int] = ()
    ) -> ForwardOutput:
        """Forward of N packed tokens; writes their K/V to the pool."""
        return self.model.forward(batch.tokens, self.kv, batch.meta, num_layers=num_layers, taps=taps)

    def node_logits(self, batch: PackedBatch, *, num_layers: int | None = None) -> Tensor:
        """Logits after the tree nodes of a packed batch, `[M, V]`."""
        hidden = self.run(batch, num_layers=num_layers).hidden
        return self.model.logits(batch.select_nodes(hidden))

    def pack_tree(
        self,
        tree: TokenTree,
        root_positions: Sequence[int],
        block_tables: Tensor,
        missing: Sequence[Sequence[int]] | None = None,
    ) -> PackedBatch:
        """Packs whole trees; node i of a request takes tree slot i. Arguments as in `pack`."""
        width = tree.ancestor_words.shape[1]
        slot_depths = torch.zeros(tree.batch_size, 32 * width, dtype=torch.int32, device=tree.tokens.device)
        slot_depths[tree.request_of_node, tree.index_in_request] = tree.depth.int()
        nodes = TreeNodes(
            tokens=tree.tokens,
            depths=tree.depth,
            slots=tree.index_in_request,
            ancestors=tree.ancestor_words,
            counts=tree.num_nodes,
            num_slots=tree.num_nodes,
            slot_depths=slot_depths,
            max_depth=tree.max_depth,
        )
        return pack(nodes, root_positions, block_tables, self.block_size, missing)

    def move_kv(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves K/V between physical slots, in all layers; ranges may overlap."""
        if not sources:
            return
        compact_kv(
            self.kv,
            torch.tensor(sources, dtype=torch.int64, device=self.device),
            torch.tensor(targets, dtype=torch.int64, device=self.device),
        )
