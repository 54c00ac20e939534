"""What a model is tried on when it is loaded: a prompt, then a tree that reads the prompt's pages."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.tree_attention.builder import Request, build_metadata, num_pages
from specdec.kernels.tree_attention.metadata import AttentionMetadata

PROMPT = Request(cached=0, prefill=2)
CHAIN = Request(cached=3, parents=(-1, 0, 1))
BLOCK_SIZE = 8
NUM_BLOCKS = num_pages([CHAIN], BLOCK_SIZE)
"""One page holds both requests, so the metadata of each points at the same one."""


def tokens(vocab_size: int, device: torch.device) -> Tensor:
    """Fixed, spread-out token ids, three for each request: `[6]` int64."""
    return (torch.arange(6, device=device) * 7919 + 11) % vocab_size


def metadata(request: Request, device: torch.device) -> AttentionMetadata:
    """The metadata of a batch of one request."""
    meta = build_metadata([request], BLOCK_SIZE)
    moved: dict[str, Any] = {}
    for field in fields(meta):
        value = getattr(meta, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device)
    return replace(meta, **moved)
