"""What the queries of one packed forward may see: the contract between the engine and every attention kernel.

A step packs the tokens of many requests into one row dimension. Each request contributes the committed
tokens whose K/V is still missing (a prefill chunk, often empty) followed by the nodes of its token tree.
Logical slots count a request's cache positions from 0; `block_tables` maps them to pages.

* a committed token at position t has its K/V in logical slot t and sees the slots `< t + 1`;
* tree node i (node 0 is the root, the last committed token) has its K/V in logical slot `tree_start + i`
  and sees the slots `< tree_start` plus those of its ancestors and itself.

Both are the same rule: see slot s if `s < causal_limits[n]`, or if bit `s - tree_starts[b]` of the query's
ancestor words is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """One instance serves every layer of a forward over N packed queries of B requests.

    Shape legend: B requests, N packed queries, W ancestor words, P pages of the widest block table.
    """

    query_offsets: Tensor
    """`[B + 1]` int32: request b owns the query rows `query_offsets[b]:query_offsets[b + 1]`."""
    tree_starts: Tensor
    """`[B]` int32: logical slot of the root; committed tokens before it fill the slots `< tree_starts[b]`."""
    causal_limits: Tensor
    """`[N]` int32: every logical slot below this is visible to the query."""
    ancestors: Tensor
    """`[N, W]` int32: bit i of word w set if slot `tree_starts[b] + 32 * w + i` is visible; zero for
    committed tokens before the root. A node's own bit and the root's bit are set."""
    positions: Tensor
    """`[N]` int64: sequence position of the query (tree_start + depth for a node)."""
    depths: Tensor
    """`[N]` int32: depth in the tree; 0 for the root and for committed tokens."""
    slot_depths: Tensor
    """`[B, 32 * W]` int32: depth of the node in each tree slot; unused slots are 0."""
    slots: Tensor
    """`[N]` int64: physical slot (`page * block_size + offset`) that receives the query's own K/V."""
    block_tables: Tensor
    """`[B, P]` int32: page of each logical block; entries past a request's last page are 0 and never read."""
    block_size: int
    max_query_len: int
    """Largest number of queries of one request, known on the host."""
    max_kv_len: int
    """Largest number of logical slots any query's request uses, known on the host."""
    kv_lens: Tensor
    """`[B]` int32: logical slots in use: `tree_starts + highest written tree slot + 1`."""
    host: HostMetadata
    """The same lengths as Python integers, so that a CPU path can loop without reading tensors back."""
    windowed: dict[int, Tensor] = field(default_factory=dict)
    """Cache for `ancestors_within`."""

    def ancestors_within(self, window: int) -> Tensor:
        """Ancestor words restricted to a sliding window.

        A query at position t sees the positions `> t - window`. Committed slots equal positions, so kernels
        test them directly; tree slots are not ordered by position, so ancestors that lie `window` or more
        levels up are removed here.

        Args:
            window: number of visible positions, the query's own included.

        Returns:
            `[N, W]` int32.
        """
        if window > self.host.max_depth:
            return self.ancestors
        if window not in self.windowed:
            self.windowed[window] = _drop_distant_ancestors(self, window)
        return self.windowed[window]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMetadata:
    """Host copies of `AttentionMetadata` lengths, all lists of length B (`query_offsets`: B + 1)."""

    query_offsets: list[int]
    tree_starts: list[int]
    kv_lens: list[int]
    num_prefill: list[int]
    """Queries of the request that are committed tokens before the root; they come first and are causal."""
    max_depth: int


def _drop_distant_ancestors(meta: AttentionMetadata, window: int) -> Tensor:
    num_queries, num_words = meta.ancestors.shape
    shifts = torch.arange(32, device=meta.ancestors.device, dtype=torch.int64)
    words = meta.ancestors.long().unsqueeze(-1)  # [N, W, 1]
    visible = ((words >> shifts) & 1).view(num_queries, num_words * 32).bool()
    slot_depths = meta.slot_depths.repeat_interleave(meta.query_offsets.diff().long(), dim=0)  # [N, 32W]
    visible &= meta.depths.unsqueeze(1) - slot_depths < window
    packed = (visible.view(num_queries, num_words, 32).long() << shifts).sum(-1)  # [N, W]
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()
