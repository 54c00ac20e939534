"""Configuration of the engine and of speculation: frozen dataclasses; Hydra only composes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.core.checks import check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes of the serving core."""

    block_size: int = 16
    """Tokens a page."""
    num_blocks: int | None = None
    """Pages of the pool; None makes room for `num_kv_tokens`."""
    num_kv_tokens: int = 16_384
    """Tokens the pool holds when `num_blocks` is None."""
    max_num_seqs: int = 16
    """Requests decoded together."""
    max_num_batched_tokens: int = 4096
    """Tokens one forward packs; a single longer prompt still runs, alone."""
    max_model_len: int | None = None
    """Prompt plus output of one request; None takes the model's context, or the pool if that is smaller."""
    seed: int = 0
    """Base of the seeds of requests that bring none."""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_kv_tokens", "max_num_seqs", "max_num_batched_tokens"):
            check_positive(name, getattr(self, name))
        for name in ("num_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))

    @property
    def pool_blocks(self) -> int:
        return self.num_blocks or -(-self.num_kv_tokens // self.block_size)


NO_DRAFTER = "none"
"""In place of a drafter's name: plain decoding with a given verifier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Drafter, tree and verifier by registry name, each with the arguments of its class."""

    drafter: str
    """See `specdec ls`; "none" decodes plainly, with the verifier's own way of drawing."""
    drafter_args: Mapping[str, Any] = field(default_factory=dict)
    tree: str = "chain"
    tree_args: Mapping[str, Any] = field(default_factory=dict)
    verifier: str = "token"
    verifier_args: Mapping[str, Any] = field(default_factory=dict)
    max_nodes_by_batch: Mapping[int, int] = field(default_factory=dict)
    """Caps the drafted nodes of each request by the number of running requests: `{4: 3, 8: 1}` allows 3 nodes
    from 4 requests on and 1 from 8 on; 0 switches speculation off. Empty leaves the tree's own size."""
    max_batch_nodes: int | None = None
    """Drafted nodes of a step, shared among all requests by path score, one or more for each that drafts; only
    for trees of the DETERMINISTIC law. None gives every request its whole tree."""

    def __post_init__(self) -> None:
        for batch_size, nodes in self.max_nodes_by_batch.items():
            if int(batch_size) < 1 or nodes < 0:
                raise ValueError(
                    f"max_nodes_by_batch[{batch_size}]={nodes}: expected a batch size >= 1 and nodes >= 0"
                )
        if self.max_batch_nodes is not None:
            check_positive("max_batch_nodes", self.max_batch_nodes)

    def node_cap(self, num_running: int, max_nodes: int) -> int:
        """Drafted nodes a request may have when `num_running` requests decode together."""
        applicable = [int(size) for size in self.max_nodes_by_batch if int(size) <= num_running]
        if not applicable:
            return max_nodes
        by_batch = {int(size): nodes for size, nodes in self.max_nodes_by_batch.items()}
        return min(max_nodes, by_batch[max(applicable)])
