"""A request's life: waiting, running, finished; its tokens, its pages, its statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from specdec.core import SamplingParams
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
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_preemptions: int = 0
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

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

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Appends new tokens up to the first stop id or the length limit, and sets the finish reason.

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
        if self.finish_reason is None and self.num_remaining == 0:
            self.finish_reason = FinishReason.LENGTH
        return kept

    def reset_cache(self) -> None:
        """Forgets the cache, so that the committed tokens are computed again."""
        self.num_cached = 0
        self.blocks = []


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one request gained in a step."""

    request_id: int
    token_ids: list[int]
    origins: list[TokenOrigin]
    finish_reason: FinishReason | None = None
    error: str | None = None


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
