"""Warping: from logits to the distribution tokens are drawn from, the target's p and the drafter's q alike.

Order: masks (allowed and banned ids, `min_tokens`) and `logit_bias`, then repetition, frequency and presence
penalty, as vLLM and transformers have it (`logits.py`); temperature; top-k, top-p, min-p, in transformers' order;
softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core.logits import change_logits
from specdec.core.sampling_batch import SamplingBatch

# A nucleus is nearly always inside the most likely tokens: sorting these first avoids sorting the vocabulary.
_NUCLEUS_GUESS = 1024


def warp(logits: Tensor, sampling: SamplingBatch, requests: Tensor, paths: Tensor | None = None) -> Tensor:
    """Turns logits into the distribution tokens are drawn from.

    Args:
        logits: `[n, V]`, any float dtype.
        sampling: parameters of the batch, with histories where they are needed.
        requests: `[n]` int64, the request each row belongs to.
        paths: `[n, D]` int64, drafted tokens from the root (excluded) to the row's node, the node included; -1
            pads. Needed only if `sampling.uses_history`.

    Returns:
        `[n, V]` float32 probabilities; one-hot on the first maximum for greedy requests.

    Raises:
        ValueError: paths or a history are missing.
    """
    return draw_law(change_logits(logits, sampling, requests, paths), sampling, requests)


def draw_law(logits: Tensor, sampling: SamplingBatch, requests: Tensor) -> Tensor:
    """The second half of `warp`: temperature, filters and softmax of logits that were changed before."""
    if sampling.all_greedy:
        return one_hot_argmax(logits)
    scores = logits.float()  # [n, V]
    if any(params.temperature != 1 for params in sampling.params):
        scores = scores / sampling.temperature[requests].unsqueeze(1)
    if any(params.top_k for params in sampling.params):
        scores = _keep_top_k(scores, sampling.top_k[requests])
    probs = scores.softmax(-1)
    if any(params.top_p < 1 for params in sampling.params):
        probs = _keep_top_p(probs, sampling.top_p[requests])
    if any(params.min_p > 0 for params in sampling.params):
        probs = _keep_min_p(probs, sampling.min_p[requests].unsqueeze(1))
    if any(params.is_greedy for params in sampling.params):
        probs = torch.where(sampling.greedy[requests].unsqueeze(1), one_hot_argmax(logits), probs)
    return probs


def one_hot_argmax(logits: Tensor) -> Tensor:
    """`[n, V]` float32 with a one at the first maximum of each row."""
    return torch.zeros(logits.shape, device=logits.device).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)


def sample(weights: Tensor, coins: Tensor) -> Tensor:
    """Draws one index a row by inverting the cumulative sum; never an index of weight zero.

    Args:
        weights: `[n, V]` float32, non-negative, not all zero; need not be normalised.
        coins: `[n]` float64 in [0, 1).

    Returns:
        `[n]` int64.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)  # [n, V]
    threshold = coins.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def race(weights: Tensor, coins: Tensor) -> Tensor:
    """Draws one index a row by an exponential race, the Gumbel-max trick: argmin -log(coin) / weight.

    Two distributions that race with the same coins often have the same winner.

    Args:
        weights: `[n, V]` float32, non-negative, not all zero; need not be normalised.
        coins: `[n, V]` float64 in (0, 1).

    Returns:
        `[n]` int64.
    """
    return (coins.log() / weights).argmax(-1)


def _keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    num_tokens = scores.shape[-1]
    limit = torch.where(top_k > 0, top_k, num_tokens).clamp(max=num_tokens)  # [n]
    largest = min(int(top_k.max()), num_tokens)
    if largest == 0:
        # Another row of the batch asked for the filter; it is not among these.
        return scores
    values = scores.topk(largest, -1).values  # [n, K]
    kth = values.gather(1, (limit.clamp(max=largest) - 1).unsqueeze(1))
    kth = torch.where((top_k > 0).unsqueeze(1), kth, float("-inf"))
    return scores.masked_fill(scores < kth, float("-inf"))


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    in_force = top_p < 1
    ordered, order = _likeliest(probs, top_p)  # [n, K]
    # A token stays if the mass before it has not reached top_p yet; the most likely one always stays.
    mass_before = ordered.cumsum(-1) - ordered
    keep = mass_before < top_p.unsqueeze(1)
    kept = torch.zeros_like(probs).scatter_(1, order, ordered * keep)
    return torch.where(in_force.unsqueeze(1), _renormalise(kept), probs)


def _likeliest(probs: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """At least the tokens of each nucleus, most likely first, and their ids; ties go to the lower id.

    The order, ties included, is the same whether a neighbour's row asks for the whole vocabulary or not.
    """
    if probs.shape[-1] > _NUCLEUS_GUESS:
        ordered, order = probs.topk(_NUCLEUS_GUESS, -1)  # [n, K]
        # Of the tokens tied with the last one, topk has returned any: they must not be needed.
        certain = (ordered * (ordered > ordered[:, -1:])).sum(-1)
        if bool(((certain >= top_p) | (top_p >= 1)).all()):
            order = order.sort(-1).values
            ordered, by_probability = probs.gather(1, order).sort(dim=-1, descending=True, stable=True)
            return ordered, order.gather(1, by_probability)
    return probs.sort(dim=-1, descending=True, stable=True)


def _keep_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    floor = probs.amax(-1, keepdim=True) * min_p
    return torch.where(min_p > 0, _renormalise(probs.masked_fill(probs < floor, 0)), probs)


def _renormalise(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
