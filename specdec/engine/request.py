"""A request's life: waiting, running, finished; its tokens, its pages, its statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from specdec.core import SamplingParams, TokenHistory
from specdec.engine.logprobs import TokenLogprobs
from specdec.engine.metrics import SpeculationStats


class FinishReason(Enum):
    """Why a request ended. `stop`: EOS or a stop id; `length`: max_tokens or the context limit."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenOrigin(Enum):
    """Where an output token came from."""

    PREFILL = "prefill"
    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


@dataclass(kw_only=True, eq=False)
class Request:
    """One generation. Positions count from 0; the root is the last committed token."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_len: int
    """Prompt plus output at most."""
    stop_ids: frozenset[int]
    token_ids: list[int] = field(init=False)
    """Committed tokens, prompt and output."""
    num_cached: int = 0
    """Committed tokens whose K/V is in the cache; all but the root once the prompt is processed."""
    blocks: list[int] = field(default_factory=list)
    table_row: int = -1
    """Row in the engine's block-table tensor while running."""
    budget: int = 0
    """Drafted nodes allowed in the current step; set by the scheduler."""
    history: TokenHistory | None = None
    """Counts of the committed tokens; only while the request runs, and only if its parameters need it."""
    logprobs: list[TokenLogprobs] | None = field(init=False)
    """One entry an output token; None if the parameters ask for none."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_preemptions: int = 0
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.logprobs = None if self.params.logprobs is None else []

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def root_position(self) -> int:
        return len(self.token_ids) - 1

    @property
    def num_remaining(self) -> int:
        """Tokens the request may still gain."""
        return self.max_len - len(self.token_ids)

    @property
    def is_prefilled(self) -> bool:
        """Whether only the root's K/V is missing, so that a tree can be drafted."""
        return self.num_cached == self.root_position

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def recall(self, vocab_size: int, device: torch.device) -> TokenHistory | None:
        """The history, made from the tokens when it is first asked for; None if the parameters need none."""
        if self.history is None and self.params.uses_history:
            self.history = TokenHistory(
                self.prompt_token_ids,
                self.output_token_ids,
                vocab_size=vocab_size,
                device=device,
                end_ids=self.stop_ids,
            )
        return self.history

    def commit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> list[int]:
        """Appends new tokens up to the first stop id or the length limit, and sets the finish reason.

        Args:
            tokens: what a step brought.
            logprobs: one entry a token; empty if the request asks for none.

        Returns:
            The tokens kept.
        """
        kept = list(tokens[: self.num_remaining])
        for index, token in enumerate(kept):
            if token in self.stop_ids:
                kept = kept[: index + 1]
                self.finish_reason = FinishReason.STOP
                break
        self.token_ids += kept
        if self.history is not None:
            self.history.extend(kept)
        if self.logprobs is not None:
            self.logprobs += logprobs[: len(kept)]
        if self.finish_reason is None and self.num_remaining == 0:
            self.finish_reason = FinishReason.LENGTH
        return kept

    def reset_cache(self) -> None:
        """Forgets the cache and the history, so that they are made again from the committed tokens."""
        self.num_cached = 0
        self.blocks = []
        self.history = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one request gained in a step."""

    request_id: int
    token_ids: list[int]
    origins: list[TokenOrigin]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token; None if the request asks for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A finished request."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: str | None
    stats: SpeculationStats
    ttft: float | None
    """Seconds from arrival to the first token; None if there is none."""
    latency: float
    """Seconds from arrival to the end."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry an output token; None if the request asked for none."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log probabilities; None if the request asked for none."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)
