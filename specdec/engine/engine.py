"""The engine: requests in, tokens out; one `step` at a time for serving loops."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.core import SamplingParams
from specdec.core.checks import is_integer
from specdec.drafters.base import DrafterContext
from specdec.engine.admission import check_sampling
from specdec.engine.block_manager import BlockManager
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.engine.model_runner import ModelRunner
from specdec.engine.request import FinishReason, Request, StepOutput, TokenOrigin
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation, build_speculation
from specdec.engine.step import SpeculativeStep, StepResult
from specdec.models.target import TargetModel
from specdec.verifiers.registry import VERIFIERS

StepObserver = Callable[[StepResult, Sequence[int]], None]
"""Called after each step, outside its times, with its result and the number of tokens each request kept."""

_SEED_STRIDE = 0x9E3779B97F4A7C15


class Engine:
    """Continuous batching over one target, with or without speculation.

    Args:
        model: the target.
        config: sizes.
        speculative: drafter, tree and verifier; None decodes plainly.

    Raises:
        ValueError: a pair of proposal law and verifier that is not exact, or sizes that don't fit.
    """

    def __init__(
        self,
        model: TargetModel,
        config: EngineConfig | None = None,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.model = model
        self.blocks = BlockManager(self.config.pool_blocks, self.config.block_size)
        self.target = ModelRunner(model, self.blocks.num_blocks, self.config.block_size)
        self.speculation: Speculation | None = None
        if speculative is not None:
            pool_tokens = self.blocks.num_blocks * self.config.block_size
            context = DrafterContext(
                target=self.target,
                eos_token_ids=model.eos_token_ids,
                max_model_len=min(self.config.max_model_len or model.max_context, pool_tokens),
                seed=self.config.seed,
            )
            self.speculation = build_speculation(speculative, context)
        self.drafter = self.speculation.drafter if self.speculation else None
        self.max_nodes = self.drafter.max_nodes if self.drafter else 0
        self.max_model_len = self._resolve_max_len()
        self.scheduler = Scheduler(self.blocks, self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.step_runner = SpeculativeStep(
            self.target,
            self.speculation.verifier if self.speculation else VERIFIERS.create("target_only"),
            self.drafter,
        )
        # Pages a table can address: the longest request and its largest tree.
        self._table_width = self.blocks.blocks_for(self.max_model_len + self.max_nodes)
        self.observers: list[StepObserver] = []
        self._requests: dict[int, Request] = {}
        self._numbers = itertools.count()
        # Requests whose pages are in use: an abort from a callback or another thread waits for their step.
        self._in_step: list[Request] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def kv_bytes(self) -> int:
        """Bytes of the K/V pools, target and drafter."""
        return self.target.kv_bytes + (self.drafter.memory_bytes() if self.drafter else 0)

    def request(self, request_id: int) -> Request:
        """A request that has not been taken out by `pop_finished`."""
        return self._requests[request_id]

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queues a request.

        Args:
            prompt_token_ids: at least one token id.
            params: how to decode; None takes the defaults.

        Returns:
            The request's number.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, a prompt that fills the context, no token
                that could be drawn, or a temperature the verifier cannot serve.
        """
        params = params or SamplingParams()
        prompt = self._check_prompt(prompt_token_ids, params)
        number = next(self._numbers)
        limit = self.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        stop_ids = self.end_ids(params)
        check_sampling(params, self.model.vocab_size, stop_ids)
        request = Request(
            request_id=number,
            prompt_token_ids=prompt,
            params=params,
            seed=self._derive_seed(number) if params.seed is None else params.seed,
            max_len=min(limit, self.max_model_len),
            stop_ids=stop_ids,
        )
        self._requests[number] = request
        self.scheduler.add(request)
        return number

    def end_ids(self, params: SamplingParams) -> frozenset[int]:
        """Ids that end a request with these parameters."""
        return frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.model.eos_token_ids)

    def abort(self, request_id: int) -> None:
        """Ends a request at once, or with the step it is in; unknown or finished requests are ignored."""
        request = self._requests.get(request_id)
        if request is not None and not request.is_finished:
            request.finish_reason = FinishReason.ABORT
            if request not in self._in_step:
                self._finish(request)

    def pop_finished(self, request_id: int) -> Request:
        """Hands a finished request over and forgets it."""
        assert self._requests[request_id].is_finished, f"request {request_id} is still running"
        return self._requests.pop(request_id)

    def step(self) -> list[StepOutput]:
        """Schedules, proposes, forwards, verifies and commits once.

        Returns:
            What each request of the step gained, in scheduling order; empty if there is no work.
        """
        start = time.perf_counter()
        requests, preempted = self.scheduler.schedule(self._node_cap())
        if preempted and self.drafter:
            self.drafter.free([request.request_id for request in preempted])
        if not requests:
            return []
        block_tables = self._block_tables(requests)
        scheduled = time.perf_counter() - start
        self._in_step = requests
        try:
            result = self.step_runner.run(requests, block_tables)
            start = time.perf_counter()
            outputs = self._commit(result, block_tables)
        finally:
            self._in_step = []
        result.times.schedule += scheduled
        result.times.commit = time.perf_counter() - start
        for observer in self.observers:
            observer(result, [len(output.token_ids) for output in outputs])
        return outputs

    def check_integrity(self) -> None:
        """Asserts that the requests' pages account for the whole pool."""
        held = [request.blocks for request in self._requests.values() if not request.is_finished]
        self.blocks.check_integrity(held)

    def _node_cap(self) -> int:
        if self.speculation is None:
            return 0
        return self.speculation.config.node_cap(len(self.scheduler.running), self.max_nodes)

    def _commit(self, result: StepResult, block_tables: Tensor) -> list[StepOutput]:
        self.step_runner.compact(result)
        outputs, num_committed = [], []
        for row, request in enumerate(result.requests):
            output = self._commit_request(request, row, result)
            num_committed.append(len(output.token_ids))
            outputs.append(output)
        self.step_runner.observe(result, num_committed, block_tables)
        for request in result.requests:
            if request.is_finished:
                self._finish(request)
            else:
                self.scheduler.trim(request)
        return outputs

    def _commit_request(self, request: Request, row: int, result: StepResult) -> StepOutput:
        if request.is_finished:
            return _output(request, [], [])
        if result.errors[row] is not None:
            request.error = result.errors[row]
            request.finish_reason = FinishReason.ERROR
            return _output(request, [], [])
        if not request.is_prefilled and request.num_output_tokens:
            # Resumed after preemption: the cache is rebuilt, and the lost step is taken next, as it would
            # have been. So the token drawn here is dropped.
            request.num_cached = request.root_position
            return _output(request, [], [])
        from_prefill = request.num_output_tokens == 0
        num_accepted = len(result.paths[row])
        request.num_cached = request.root_position + 1 + num_accepted
        kept = request.commit(result.tokens[row], result.logprobs[row])
        if from_prefill:
            request.stats.num_prefill_tokens += len(kept)
            request.first_token_time = time.perf_counter()
            return _output(request, kept, [TokenOrigin.PREFILL])
        start, end = result.tree.host_offsets[row], result.tree.host_offsets[row + 1]
        parents = result.tree.host_parents[start:end]
        path = result.paths[row]
        num_children = [parents.count(node) for node in (0, *path)]
        at_leaf = num_children[-1] == 0
        request.stats.record_step(
            num_drafted=end - start - 1,
            tree_depth=result.tree.host_depths[row],
            num_accepted=num_accepted,
            num_emitted=len(kept),
            at_leaf=at_leaf,
            ranks=[parents[:node].count(parents[node]) for node in path],
            num_children=num_children,
        )
        final = TokenOrigin.BONUS if at_leaf else TokenOrigin.CORRECTION
        origins = [TokenOrigin.ACCEPTED] * num_accepted + [final]
        return _output(request, kept, origins[: len(kept)])

    def _finish(self, request: Request) -> None:
        request.finish_time = time.perf_counter()
        self.scheduler.finish(request)
        if self.drafter:
            self.drafter.free([request.request_id])

    def _block_tables(self, requests: Sequence[Request]) -> Tensor:
        width = max(len(request.blocks) for request in requests)
        rows = [request.blocks + [0] * (width - len(request.blocks)) for request in requests]
        return torch.tensor(rows, dtype=torch.int32, device=self.model.device)

    def _check_prompt(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        wrong = [token for token in prompt_token_ids if not is_integer(token)]
        if wrong:
            raise ValueError(f"prompt_token_ids holds {wrong[0]!r}: expected integers; encode text first")
        prompt = [int(token) for token in prompt_token_ids]
        if not prompt:
            raise ValueError("prompt_token_ids is empty; give at least one token, such as the BOS id")
        outside = [token for token in prompt if not 0 <= token < self.model.vocab_size]
        if outside:
            raise ValueError(
                f"prompt_token_ids holds {outside[0]}; ids of {self.model.name!r} are 0 to "
                f"{self.model.vocab_size - 1}: was the prompt encoded with another tokenizer?"
            )
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and max_model_len={self.max_model_len}: no room for an "
                "output token; shorten the prompt or raise engine.max_model_len"
            )
        verifier = self.step_runner.verifier
        if verifier.greedy_only and not params.is_greedy:
            serving = [name for name in VERIFIERS.names() if not VERIFIERS.get(name).greedy_only]
            raise ValueError(
                f"temperature={params.temperature}: the configured verifier serves temperature 0 only; "
                f"for sampling use verifier: {', '.join(serving)}"
            )
        return prompt

    def _resolve_max_len(self) -> int:
        context, pool = self.model.max_context, self.blocks.num_blocks * self.config.block_size
        asked = self.config.max_model_len
        if asked is not None and asked > context:
            raise ValueError(f"max_model_len={asked}: {self.model.name!r} has a context of {context} tokens")
        # The last step needs room for the committed tokens and a whole tree.
        limit = pool - self.max_nodes
        if limit < 1 or (asked is not None and asked > limit + 1):
            needed = self.blocks.blocks_for((asked or 2) - 1 + self.max_nodes)
            raise ValueError(
                f"num_blocks={self.blocks.num_blocks}: one request of max_model_len={asked or 2} with a tree "
                f"of {self.max_nodes} nodes needs {needed} blocks; raise num_blocks or lower max_model_len"
            )
        return asked if asked is not None else min(context, limit + 1)

    def _derive_seed(self, number: int) -> int:
        return (self.config.seed + (number + 1) * _SEED_STRIDE) & 0x7FFFFFFFFFFFFFFF


def _output(request: Request, tokens: list[int], origins: list[TokenOrigin]) -> StepOutput:
    logprobs = request.logprobs
    return StepOutput(
        request_id=request.request_id,
        token_ids=tokens,
        origins=origins,
        finish_reason=request.finish_reason,
        error=request.error,
        logprobs=None if logprobs is None else logprobs[len(logprobs) - len(tokens) :],
    )
