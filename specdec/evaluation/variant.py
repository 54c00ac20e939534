"""One way of decoding under measurement: an engine, and what its steps cost.

Times are sums of engine step times, so neither tracing nor logging between steps counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdec.core import SamplingParams
from specdec.data import TokenizedPrompt
from specdec.engine.engine import Engine
from specdec.engine.metrics import SpeculationStats, StepTimes
from specdec.engine.request import FinishReason, Request
from specdec.engine.step import StepResult


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of the engine."""

    step: int
    """Number of the step within its variant."""
    num_requests: int
    num_nodes: int
    """Tree nodes verified, roots included."""
    num_emitted: int
    has_prefill: bool
    """Some request's prompt was processed in this step."""
    times: StepTimes


@dataclass(kw_only=True)
class RequestRecord:
    """What became of one prompt."""

    prompt: TokenizedPrompt
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ERROR
    error: str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    ttft: float | None = None
    """Seconds of engine time until the first token."""
    itl: list[float] = field(default_factory=list)
    """For each further token, the seconds of its step over the tokens the request gained in it."""
    seconds: float = 0.0
    """Seconds of engine time until the last token."""


@dataclass(kw_only=True)
class BatchRecord:
    """Prompts that were decoded together."""

    requests: list[RequestRecord]
    steps: list[StepRecord]

    @property
    def seconds(self) -> float:
        return sum(step.times.total for step in self.steps)

    @property
    def decode_seconds(self) -> float:
        """Seconds of the steps without a prefill."""
        return sum(step.times.total for step in self.steps if not step.has_prefill)

    @property
    def num_tokens(self) -> int:
        return sum(step.num_emitted for step in self.steps)

    @property
    def num_decode_tokens(self) -> int:
        return sum(step.num_emitted for step in self.steps if not step.has_prefill)

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats.merge([request.stats for request in self.requests])


class Variant:
    """An engine that decodes batch after batch while its steps are recorded.

    Args:
        name: `plain` or `speculative`.
        engine: with no requests of its own.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.batches: list[BatchRecord] = []
        self._num_steps = 0
        self._steps: list[StepRecord] = []
        self._elapsed = 0.0
        self._active: dict[int, RequestRecord] = {}
        engine.observers.append(self._record)

    def prompt_of(self, request_id: int) -> TokenizedPrompt:
        """The prompt of a running request."""
        return self._active[request_id].prompt

    @property
    def current_step(self) -> int:
        """Number of the step that was recorded last."""
        return self._num_steps - 1

    def warm_up(self, prompts: Sequence[TokenizedPrompt], params: SamplingParams, num_tokens: int) -> None:
        """Decodes a few tokens and forgets them."""
        short = replace(params, max_tokens=num_tokens, min_tokens=0, ignore_eos=True)
        self.run(prompts, [short] * len(prompts))
        self.batches.clear()
        self._num_steps = 0
        self.engine.blocks.peak_used = 0

    def run(self, prompts: Sequence[TokenizedPrompt], params: Sequence[SamplingParams]) -> BatchRecord:
        """Decodes prompts together. One that can't be served is recorded with its error."""
        records = [RequestRecord(prompt=prompt) for prompt in prompts]
        self._steps, self._elapsed = [], 0.0
        for record, param in zip(records, params, strict=True):
            try:
                request_id = self.engine.add_request(record.prompt.token_ids, param)
            except ValueError as error:
                record.error = str(error)
            else:
                self._active[request_id] = record
        while self.engine.has_work:
            for output in self.engine.step():
                if output.finish_reason is not None:
                    finished = self.engine.pop_finished(output.request_id)
                    _complete(self._active.pop(output.request_id), finished)
        batch = BatchRecord(requests=records, steps=self._steps)
        self.batches.append(batch)
        return batch

    def _record(self, result: StepResult, num_kept: Sequence[int]) -> None:
        has_prefill = False
        seconds = result.times.total
        self._elapsed += seconds
        for request, kept in zip(result.requests, num_kept, strict=True):
            record = self._active[request.request_id]
            record.seconds = self._elapsed
            if request.num_output_tokens > kept:
                record.itl += [seconds / kept] * kept if kept else []
            else:
                has_prefill = True
                record.ttft = self._elapsed if kept else None
        self._steps.append(
            StepRecord(
                step=self._num_steps,
                num_requests=len(result.requests),
                num_nodes=len(result.tree.tokens),
                num_emitted=sum(num_kept),
                has_prefill=has_prefill,
                times=result.times,
            )
        )
        self._num_steps += 1


def _complete(record: RequestRecord, request: Request) -> None:
    assert request.finish_reason is not None
    record.token_ids = request.output_token_ids
    record.finish_reason = request.finish_reason
    record.error = request.error
    record.stats = request.stats
