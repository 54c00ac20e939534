"""Sampling parameters and warping: written once, applied to the target's p and to the drafter's q alike.

Order and names follow transformers' `GenerationConfig`: temperature, top-k, top-p, min-p, softmax.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.core.checks import is_integer, is_real

# A nucleus is nearly always inside the most likely tokens: sorting these first avoids sorting the vocabulary.
_NUCLEUS_GUESS = 1024
# Below this temperature logits divided by it could overflow; the distribution is one-hot long before.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is decoded. Names follow vLLM's `SamplingParams`."""

    max_tokens: int | None = 128
    """New tokens at most; None decodes until EOS or the context limit."""
    temperature: float = 1.0
    """0, like anything below 1e-5, is greedy decoding."""
    top_k: int = 0
    """Keep the k most likely tokens (ties kept); 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this mass."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the most likely token's probability."""
    seed: int | None = None
    """Seed of the request's random streams; None derives one from engine seed and request number."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request besides the model's EOS ids; the id itself is kept in the output."""
    ignore_eos: bool = False
    """Go on past the model's EOS ids (never past `stop_token_ids`)."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "seed"):
            value = getattr(self, name)
            _check(name, value, value is None or is_integer(value), "to be an integer or None")
        for name in ("temperature", "top_p", "min_p"):
            _check(name, getattr(self, name), is_real(getattr(self, name)), "to be a number")
        _check("top_k", self.top_k, is_integer(self.top_k), "to be an integer")
        stops = self.stop_token_ids
        listed = not isinstance(stops, str) and isinstance(stops, Collection) and all(map(is_integer, stops))
        _check("stop_token_ids", stops, listed, "to hold token ids")
        _check("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, ">= 1 or None")
        _check("temperature", self.temperature, 0 <= self.temperature < float("inf"), "finite and >= 0")
        _check("top_k", self.top_k, self.top_k >= 0, ">= 0 (0 keeps all tokens)")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _check("seed", self.seed, self.seed is None or 0 <= self.seed < 2**63, "in [0, 2**63) or None")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW


def _check(name: str, value: object, valid: bool, expectation: str) -> None:
    if not valid:
        raise ValueError(f"{name}={value!r}: expected {name} {expectation}")


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """The sampling parameters of B requests, once as objects for the host and once as tensors."""

    params: Sequence[SamplingParams]
    device: torch.device

    @cached_property
    def all_greedy(self) -> bool:
        return all(params.is_greedy for params in self.params)

    @cached_property
    def greedy(self) -> Tensor:
        """`[B]` bool."""
        return torch.tensor([params.is_greedy for params in self.params], device=self.device)

    @cached_property
    def temperature(self) -> Tensor:
        """`[B]` float32; 1 for greedy requests, whose row becomes one-hot anyway."""
        return self._tensor([1.0 if params.is_greedy else params.temperature for params in self.params])

    @cached_property
    def top_k(self) -> Tensor:
        """`[B]` int64; 0 where the filter is off."""
        return torch.tensor([params.top_k for params in self.params], device=self.device)

    @cached_property
    def top_p(self) -> Tensor:
        """`[B]` float32."""
        return self._tensor([params.top_p for params in self.params])

    @cached_property
    def min_p(self) -> Tensor:
        """`[B]` float32."""
        return self._tensor([params.min_p for params in self.params])

    def select(self, rows: Sequence[int]) -> SamplingBatch:
        return SamplingBatch([self.params[row] for row in rows], self.device)

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)


def warp(logits: Tensor, sampling: SamplingBatch, requests: Tensor) -> Tensor:
    """Turns logits into the distribution tokens are drawn from.

    Args:
        logits: `[n, V]`, any float dtype.
        sampling: parameters of the batch.
        requests: `[n]` int64, the request each row belongs to.

    Returns:
        `[n, V]` float32 probabilities; one-hot on the first maximum for greedy requests.
    """
    if sampling.all_greedy:
        return one_hot_argmax(logits)
    scores = logits.float() / sampling.temperature[requests].unsqueeze(1)  # [n, V]
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
