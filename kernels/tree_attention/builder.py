"""Attention metadata from plain lists, for tests and benchmarks; the engine has a fast packer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.tree_attention.metadata import AttentionMetadata, HostMetadata


class Request(NamedTuple):
    """One request of a packed batch."""

    cached: int
    """Committed tokens whose K/V is in the cache."""
    prefill: int = 0
    """Committed tokens before the root whose K/V this forward computes."""
    parents: Sequence[int] = (-1,)
    """Parent of each tree node, -1 for the root; empty for a chunk in the middle of a prompt."""


def build_metadata(requests: Sequence[Request], block_size: int, *, seed: int = 0) -> AttentionMetadata:
    """Pack requests, with their pages scattered over a pool of `num_pages(requests, block_size)` pages.

    Args:
        requests: the batch; parents must come before children.
        block_size: slots a page.
        seed: of the page permutation.
    """
    num_words = max(1, max(-(-len(request.parents) // 32) for request in requests))
    tree_starts = [request.cached + request.prefill for request in requests]
    kv_lens = [start + len(request.parents) for start, request in zip(tree_starts, requests, strict=True)]
    tables = _block_tables(kv_lens, block_size, seed)
    offsets, limits, ancestors, depths, slot_depths, logical, owners = [0], [], [], [], [], [], []
    for b, request in enumerate(requests):
        tree_depths, tree_ancestors = _walk(request.parents)
        limits += list(range(request.cached + 1, tree_starts[b] + 1)) + [tree_starts[b]] * len(
            request.parents
        )
        ancestors += [0] * request.prefill + tree_ancestors
        depths += [0] * request.prefill + tree_depths
        slot_depths.append(tree_depths + [0] * (32 * num_words - len(tree_depths)))
        logical += list(range(request.cached, kv_lens[b]))
        owners += [b] * (request.prefill + len(request.parents))
        offsets.append(len(owners))
    slots, owner = torch.tensor(logical), torch.tensor(owners)
    starts, depth = torch.tensor(tree_starts, dtype=torch.int32), torch.tensor(depths, dtype=torch.int32)
    in_tree = slots >= starts[owner]
    return AttentionMetadata(
        query_offsets=torch.tensor(offsets, dtype=torch.int32),
        tree_starts=starts,
        causal_limits=torch.tensor(limits, dtype=torch.int32),
        ancestors=torch.tensor([_words(bits, num_words) for bits in ancestors], dtype=torch.int32),
        positions=torch.where(in_tree, starts[owner].long() + depth, slots),
        depths=depth,
        slot_depths=torch.tensor(slot_depths, dtype=torch.int32),
        slots=tables[owner, slots // block_size].long() * block_size + slots % block_size,
        block_tables=tables,
        block_size=block_size,
        max_query_len=max(stop - start for start, stop in pairwise(offsets)),
        max_kv_len=max(kv_lens),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        host=HostMetadata(
            query_offsets=offsets,
            tree_starts=tree_starts,
            kv_lens=kv_lens,
            num_prefill=[request.prefill for request in requests],
            max_depth=max(depths),
        ),
    )


def num_pages(requests: Sequence[Request], block_size: int) -> int:
    """Pages that `build_metadata` hands out, page 0, which no request owns, included."""
    return 1 + sum(
        -(-(request.cached + request.prefill + len(request.parents)) // block_size) for request in requests
    )


def _block_tables(kv_lens: list[int], block_size: int, seed: int) -> Tensor:
    counts = [-(-length // block_size) for length in kv_lens]
    pages = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).int()
    tables = torch.zeros(len(counts), max(1, *counts), dtype=torch.int32)
    for b, own in enumerate(pages.split(counts)):
        tables[b, : counts[b]] = own
    return tables


def _walk(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depth of each node, and its ancestors and itself as a bit set."""
    depths: list[int] = []
    ancestors: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        ancestors.append(1 << node | (0 if parent < 0 else ancestors[parent]))
    return depths, ancestors


def _words(bits: int, num_words: int) -> list[int]:
    words = [bits >> 32 * word & 0xFFFFFFFF for word in range(num_words)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]
