"""N-gram drafting: the text so far predicts its own continuation.

A node is expanded by the longest suffix of committed tokens plus path, from `max_n` tokens down to `min_n`,
that occurred earlier in the committed text with a token after it. Among several occurrences the later ones
weigh more, q proportional to 2**-rank from the latest back, so the argmax is what followed the latest one.
A suffix never matches itself, for nothing follows it yet; where a match overlaps the end, drafting goes on
through its own path, so a repeated token is drafted to the full budget.
Marginals are what stood at each distance after the same occurrences, with the same weights; one that reaches
the end of the text starts over with what it has copied, as an overlapping match does.
Sources: prompt lookup decoding (Saxena, 2023); LLMA, arXiv:2304.04487. The choice among matches is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from specdec.core.checks import check_positive
from specdec.drafters.base import DraftBatch, DrafterContext, DraftModel, DraftOutput
from specdec.drafters.trees.builder import Frontier

_MAX_OCCURRENCES = 8


class NGramModel(DraftModel):
    """Continues the longest suffix that occurred before, in prompt or output; needs no weights."""

    provides = frozenset(DraftOutput)

    def __init__(
        self, max_n: int = 8, min_n: int = 1, vocab_size: int = 0, eos_token_ids: Sequence[int] = ()
    ) -> None:
        check_positive("max_n", max_n)
        check_positive("min_n", min_n)
        if min_n > max_n:
            raise ValueError(f"min_n={min_n}, max_n={max_n}: expected 1 <= min_n <= max_n")
        self.max_n = max_n
        self.min_n = min_n
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._indices: dict[int, _SuffixIndex] = {}

    @classmethod
    def build(cls, context: DrafterContext, max_n: int = 8, min_n: int = 1) -> Self:  # type: ignore[override]
        return cls(max_n, min_n, context.target.model.vocab_size, context.eos_token_ids)

    def extend(self, batch: DraftBatch) -> None:
        for request_id, tokens in zip(batch.request_ids, batch.token_ids, strict=True):
            if request_id not in self._indices:
                self._indices[request_id] = _SuffixIndex(self.max_n, self.min_n)
            self._indices[request_id].extend(tokens)

    def expand(self, frontier: Frontier) -> Tensor:
        q = torch.zeros(len(frontier.rows), self.vocab_size)
        for line, weights in enumerate(self._continuations(frontier)):
            if not weights:
                # Nothing is known here; any law may still ask for a distribution.
                q[line] = 1 / self.vocab_size
            for token, weight in weights:
                q[line, token] = weight
        return q.log().to(frontier.batch.roots.device)

    def top_k(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        tokens, weights = [], []
        for candidates in self._continuations(frontier):
            best = candidates[:k] + [(0, 0.0)] * (k - len(candidates))
            tokens.append([token for token, _ in best])
            weights.append([weight for _, weight in best])
        device = frontier.batch.roots.device
        return torch.tensor(tokens, device=device), torch.tensor(weights, device=device).log()

    def marginals(self, batch: DraftBatch, depth: int) -> Tensor:
        weights = torch.zeros(batch.size, depth, self.vocab_size)
        for row, request_id in enumerate(batch.request_ids):
            for level, found in enumerate(self._indices[request_id].marginals(depth, self.eos_token_ids)):
                for token, weight in found.items():
                    weights[row, level, token] = weight
        return weights.log().to(batch.roots.device)

    def free(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._indices.pop(request_id, None)

    def _continuations(self, frontier: Frontier) -> list[list[tuple[int, float]]]:
        """Candidates of each node with their probabilities, likeliest first; none after an EOS."""
        batch = frontier.batch
        result: list[list[tuple[int, float]]] = []
        for row, path in zip(frontier.rows, frontier.paths(), strict=True):
            if path and path[-1] in self.eos_token_ids:
                result.append([])
                continue
            index = self._indices[batch.request_ids[row]]
            result.append(index.continuations(path))
        return result


class _SuffixIndex:
    """Where each n-gram of one request's committed tokens ended, for all n in range."""

    def __init__(self, max_n: int, min_n: int) -> None:
        self.max_n = max_n
        self.min_n = min_n
        self.tokens: list[int] = []
        # n-gram to the positions of the tokens that followed it, oldest first.
        self._followers: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in the committed tokens; those known before must be a prefix of them."""
        for position in range(len(self.tokens), len(tokens)):
            for n in range(self.min_n, min(self.max_n, position) + 1):
                self._followers[tuple(tokens[position - n : position])].append(position)
            self.tokens.append(tokens[position])

    def continuations(self, path: Sequence[int]) -> list[tuple[int, float]]:
        """Next tokens after committed tokens plus path, with probabilities, likeliest first."""
        weights: dict[int, float] = {}
        for position, weight in self._occurrences(path):
            token = self.tokens[position]
            weights[token] = weights.get(token, 0.0) + weight
        total = sum(weights.values())
        # Insertion order is recency, and the sort is stable: the latest continuation wins a tie.
        ranked = sorted(weights.items(), key=lambda item: -item[1])
        return [(token, weight / total) for token, weight in ranked]

    def marginals(self, depth: int, ends: Collection[int]) -> list[dict[int, float]]:
        """Weights of the tokens at distances 1 to `depth` after the committed ones; nothing follows an end."""
        levels: list[dict[int, float]] = [{} for _ in range(depth)]
        for position, weight in self._occurrences(()):
            period = len(self.tokens) - position
            for distance, weights in enumerate(levels):
                token = self.tokens[position + distance % period]
                weights[token] = weights.get(token, 0.0) + weight
                if token in ends:
                    break
        return levels

    def _occurrences(self, path: Sequence[int]) -> list[tuple[int, float]]:
        """Positions of what followed the longest known suffix of committed tokens plus path, latest first, and
        their weights."""
        suffix = self.tokens[-self.max_n :] + list(path)
        for n in range(min(self.max_n, len(suffix)), self.min_n - 1, -1):
            followers = self._followers.get(tuple(suffix[-n:]))
            if followers:
                latest = islice(reversed(followers), _MAX_OCCURRENCES)
                return [(position, 0.5 ** (rank + 1)) for rank, position in enumerate(latest)]
        return []
