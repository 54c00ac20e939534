"""Log probabilities of output tokens, from the target's rows that a step has at hand.

They are the target's own, the log-softmax of its logits before penalties, bias, masks, temperature and filters
(vLLM's default, `raw_logprobs`), whether a token was accepted, drawn instead of a rejected one, or added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALL_BUT_SIGN = 0x7FFFFFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """What the target thought of one output token, and of the likeliest ones in its place."""

    token_id: int
    logprob: float
    """Natural logarithm; the token's own, whether it is among `top` or not."""
    rank: int
    """1 for the likeliest token: one more than the number of tokens that are likelier."""
    top: tuple[tuple[int, float], ...]
    """The likeliest ids with their log probabilities, best first; equal ones by id."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log probabilities of m tokens.

    Args:
        logits: `[m, V]`, any float dtype, the row each token was drawn from.
        tokens: m token ids.
        counts: how many of the likeliest tokens to report beside each, at most V.
    """
    logprobs = logits.float().log_softmax(-1)  # [m, V]
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1)
    own = logprobs.gather(1, ids)
    ranks = (logprobs > own).sum(1) + 1
    top_ids = _likeliest(logprobs, max(counts, default=0))  # [m, K]
    top = logprobs.gather(1, top_ids)
    columns = (values.tolist() for values in (own.squeeze(1), ranks, top_ids, top))
    return [
        TokenLogprobs(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top=tuple(zip(best[:count], values[:count], strict=True)),
        )
        for token, count, logprob, rank, best, values in zip(tokens, counts, *columns, strict=True)
    ]


def _likeliest(logprobs: Tensor, count: int) -> Tensor:
    """`[m, count]` int64, the ids of the largest values, best first.

    Where values are equal topk returns any: which ones depends on how many are asked for, so on batch mates. Keys
    that end in the id leave no choice.
    """
    # Adding 0 makes -0 and 0 equal; with all other bits of a negative float flipped, its bits sort as it does.
    bits = (logprobs + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ _ALL_BUT_SIGN, bits)
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    return ((ordered << 32) - ids).topk(count, -1).indices
