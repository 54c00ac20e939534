"""`SamplingBatch`: the sampling parameters of a batch, once as objects for the host and once as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.core.history import TokenHistory
from specdec.core.sampling_params import SamplingParams


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """The sampling parameters of B requests, and what they need to know of the tokens before, for one step."""

    params: Sequence[SamplingParams]
    device: torch.device
    histories: Sequence[TokenHistory | None] | None = None
    """Committed tokens of each request; only those whose parameters `uses_history` need one."""

    @cached_property
    def all_greedy(self) -> bool:
        return all(params.is_greedy for params in self.params)

    @cached_property
    def uses_history(self) -> bool:
        """Whether some request's distribution depends on the tokens before, so that paths are needed."""
        return any(params.uses_history for params in self.params)

    @cached_property
    def biased(self) -> list[int]:
        """Requests with `logit_bias`, allowed or banned ids, on the host."""
        return [row for row, params in enumerate(self.params) if params.has_bias]

    @cached_property
    def penalised(self) -> list[int]:
        """Requests with penalties, on the host."""
        return [row for row, params in enumerate(self.params) if params.has_penalties]

    @cached_property
    def unripe(self) -> list[int]:
        """Requests that could end but have fewer than `min_tokens` output tokens, on the host."""
        return [
            row
            for row, params in enumerate(self.params)
            if params.min_tokens > 0
            and self.history(row).num_output < params.min_tokens
            and self.history(row).end_ids
        ]

    @cached_property
    def changes_logits(self) -> bool:
        """Whether some request asks for something that applies before the temperature."""
        return bool(self.biased or self.penalised or self.unripe)

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

    @cached_property
    def repetition_penalty(self) -> Tensor:
        """`[B]` float32."""
        return self._tensor([params.repetition_penalty for params in self.params])

    @cached_property
    def presence_penalty(self) -> Tensor:
        """`[B]` float32."""
        return self._tensor([params.presence_penalty for params in self.params])

    @cached_property
    def frequency_penalty(self) -> Tensor:
        """`[B]` float32."""
        return self._tensor([params.frequency_penalty for params in self.params])

    @cached_property
    def output_counts(self) -> Tensor:
        """`[P, V]` int32, committed output tokens of the penalised requests."""
        return torch.stack([self.history(row).counts for row in self.penalised])

    @cached_property
    def in_prompt(self) -> Tensor:
        """`[P, V]` bool, tokens in the prompts of the penalised requests."""
        return torch.stack([self.history(row).in_prompt for row in self.penalised])

    @cached_property
    def known_ids(self) -> Tensor:
        """`[P, U]` int64, distinct tokens of prompt and output of the penalised requests; 0 pads."""
        lines, ids = (self.in_prompt | (self.output_counts > 0)).nonzero().unbind(1)
        totals = lines.bincount(minlength=len(self.penalised))
        columns = torch.arange(len(ids), device=ids.device) - (totals.cumsum(0) - totals)[lines]
        padded = ids.new_zeros(len(totals), int(totals.max()))
        padded[lines, columns] = ids
        return padded

    def history(self, request: int) -> TokenHistory:
        """The committed tokens of one request.

        Raises:
            ValueError: the batch was built without.
        """
        history = None if self.histories is None else self.histories[request]
        if history is None:
            raise ValueError(
                f"histories[{request}]=None: the request's penalties or min_tokens depend on its tokens; give "
                "SamplingBatch a TokenHistory for it"
            )
        return history

    def select(self, rows: Sequence[int]) -> SamplingBatch:
        histories = None if self.histories is None else [self.histories[row] for row in rows]
        return SamplingBatch([self.params[row] for row in rows], self.device, histories)

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)
