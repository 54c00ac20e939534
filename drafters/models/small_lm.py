"""A small language model as drafter: any causal LM with the target's vocabulary, on its own paged cache.

The cache has its own pool and shares the target's block tables: a page number addresses the same tokens in
both. Invariant: after `extend` the cache holds all committed tokens, the root included; after `observe` it
holds the committed tokens before the new root, less the last accepted node if that was never expanded, which
the next `extend` computes. So nothing is computed twice and nothing is missing, full acceptance included.
Source: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from specdec.core import TokenTree
from specdec.drafters.base import Commit, DraftBatch, DrafterContext, DraftModel
from specdec.drafters.models.frontier import frontier_nodes
from specdec.drafters.trees.builder import Frontier
from specdec.engine.model_runner import ModelRunner
from specdec.engine.packing import pack, physical_slots
from specdec.models.loading import load_target
from specdec.models.target import TargetModel


class SmallLMModel(DraftModel):
    """Any causal LM with the target's vocabulary, on a paged cache of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._num_cached: dict[int, int] = {}
        self._root_logits: Tensor | None = None

    @classmethod
    def build(  # type: ignore[override]
        cls, context: DrafterContext, model: str | TargetModel | None = None, dtype: str | None = None
    ) -> Self:
        if model is None:
            raise ValueError(
                "small_lm needs model=<hub id, folder, GGUF file or packaged name> to draft with"
            )
        target = context.target
        if isinstance(model, str):
            model = load_target(model, dtype=dtype, device=str(target.device))
        _check_compatible(model, target.model, context.max_model_len)
        return cls(ModelRunner(model, target.num_blocks, target.block_size))

    def num_cached(self, request_id: int) -> int:
        """Committed tokens of a request whose K/V is in the draft cache."""
        return self._num_cached.get(request_id, 0)

    def extend(self, batch: DraftBatch) -> None:
        missing = [
            tokens[self.num_cached(request_id) : -1]
            for request_id, tokens in zip(batch.request_ids, batch.token_ids, strict=True)
        ]
        roots = TokenTree.root_only(batch.roots, batch.root_positions)
        positions = [len(tokens) - 1 for tokens in batch.token_ids]
        packed = self.runner.pack_tree(
            roots, positions, batch.block_tables, missing if any(missing) else None
        )
        self._root_logits = self.runner.node_logits(packed)  # [B, V]
        for request_id, tokens in zip(batch.request_ids, batch.token_ids, strict=True):
            self._num_cached[request_id] = len(tokens)

    def expand(self, frontier: Frontier) -> Tensor:
        if frontier.only_roots:
            assert self._root_logits is not None, "extend comes before expand"
            return self._root_logits[frontier.rows]
        nodes, positions, tables = frontier_nodes(frontier)
        return self.runner.node_logits(pack(nodes, positions, tables, self.runner.block_size))

    def observe(self, commit: Commit) -> None:
        """Moves the K/V of the accepted path to contiguous slots and forgets the rest."""
        tree = commit.tree
        if tree.draft_slots is None:
            return
        slots = tree.draft_slots.tolist()
        tables = commit.block_tables.tolist()
        rows: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for row, (request_id, path) in enumerate(
            zip(commit.request_ids, commit.acceptance.path.tolist(), strict=True)
        ):
            root = tree.host_offsets[row]
            if request_id not in self._num_cached or slots[root] < 0:
                continue
            base = self._num_cached[request_id] - 1
            held = [slots[node] for node in path if node >= 0 and slots[node] >= 0]
            for depth, slot in enumerate(held, start=1):
                if slot != depth:
                    rows.append(row)
                    sources.append(base + slot)
                    targets.append(base + depth)
            self._num_cached[request_id] = base + 1 + len(held)
        size = self.runner.block_size
        self.runner.move_kv(
            physical_slots(tables, rows, sources, size), physical_slots(tables, rows, targets, size)
        )

    def free(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._num_cached.pop(request_id, None)

    def memory_bytes(self) -> int:
        return self.runner.kv_bytes


def _check_compatible(draft: TargetModel, target: TargetModel, max_model_len: int) -> None:
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"model={draft.name!r} has a vocabulary of {draft.vocab_size} ids, the target {target.name!r} of "
            f"{target.vocab_size}: a drafter needs the target's tokenizer; choose a model of the same family"
        )
    if draft.max_context < max_model_len:
        raise ValueError(
            f"model={draft.name!r} has a context of {draft.max_context} tokens, requests may reach "
            f"{max_model_len}: set engine.max_model_len={draft.max_context} or draft with a longer context"
        )
