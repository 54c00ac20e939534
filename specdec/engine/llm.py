"""`LLM`: prompts in, completions out; the front door of the library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from specdec.core import SamplingParams
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.engine.detokenizer import IncrementalDetokenizer
from specdec.engine.engine import Engine
from specdec.engine.metrics import SpeculationStats
from specdec.engine.request import FinishReason, Request, RequestOutput, StepOutput
from specdec.models.loading import load_target, load_tokenizer
from specdec.models.target import TargetModel

Prompt = str | Sequence[int]


class LLM:
    """A target with an optional drafter.

    Args:
        model: packaged name, hub id, local folder, GGUF file, or a loaded `TargetModel`.
        speculative: drafter, tree and verifier; None decodes plainly.
        engine: sizes of the serving core.
        tokenizer: for text prompts; None loads the model's own.
        dtype: weights and cache, such as "bfloat16"; None chooses by device.
        device: such as "cuda:0"; None chooses.
        **loading: further arguments of `load_target`.

    Raises:
        ValueError: an unknown model, or parts that don't fit each other.
    """

    def __init__(
        self,
        model: str | TargetModel,
        *,
        speculative: SpeculativeConfig | None = None,
        engine: EngineConfig | None = None,
        tokenizer: Any = None,
        dtype: str | None = None,
        device: str | None = None,
        **loading: Any,
    ) -> None:
        if isinstance(model, TargetModel):
            self.model = model
        else:
            self.model = load_target(model, dtype=dtype, device=device, **loading)
            tokenizer = tokenizer or load_tokenizer(model)
        self.tokenizer = tokenizer
        self.engine = Engine(self.model, engine, speculative)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts, batched as the engine's sizes allow.

        Args:
            prompts: one text or one list of token ids, or a list of these.
            sampling_params: one for all prompts, or one a prompt.
            progress: show a bar with tokens a second and τ.

        Returns:
            One output a prompt, in order. A prompt that can't be served has `finish_reason` ERROR and an
            `error` that says why; the others are not affected.
        """
        batch = _as_prompts(prompts)
        params = _as_params(sampling_params, len(batch))
        outputs: dict[int, RequestOutput] = {}
        index_of: dict[int, int] = {}
        for index, (prompt, param) in enumerate(zip(batch, params, strict=True)):
            try:
                index_of[self.add_request(prompt, param)] = index
            except ValueError as error:
                outputs[index] = _refused(prompt, str(error))
        with tqdm(total=len(index_of), disable=not progress, unit="req") as bar:
            while len(outputs) < len(batch) and self.engine.has_work:
                for output in self.step():
                    if output.finish_reason is not None and output.request_id in index_of:
                        outputs[index_of.pop(output.request_id)] = self.collect(output.request_id)
                        bar.set_postfix_str(_rates(outputs.values(), bar.format_dict["elapsed"]))
                        bar.update()
        # Requests that were aborted between steps.
        outputs.update((index, self.collect(request_id)) for request_id, index in index_of.items())
        return [outputs[index] for index in range(len(batch))]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[tuple[str, StepOutput]]:
        """Completes one prompt, yielding the new text and the step's tokens as they come.

        The concatenated texts are the completion. Closing the iterator early aborts the request; aborting the
        request ends the iterator.

        Raises:
            ValueError: the prompt can't be served.
        """
        request_id = self.add_request(prompt, sampling_params)
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        try:
            while not self.engine.request(request_id).is_finished:
                for output in self.step():
                    if output.request_id == request_id:
                        final = output.finish_reason is not None
                        yield detokenizer.add(output.token_ids, final=final), output
        finally:
            self.abort(request_id)
            self.engine.pop_finished(request_id)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues a request for `step`. Raises ValueError if it can't be served."""
        return self.engine.add_request(self.encode(prompt), sampling_params)

    def step(self) -> list[StepOutput]:
        """One step of the serving loop: new tokens of every request that took part."""
        return self.engine.step()

    def abort(self, request_id: int) -> None:
        """Ends a request at once and frees its pages."""
        self.engine.abort(request_id)

    def collect(self, request_id: int) -> RequestOutput:
        """The output of a finished request; the engine forgets it."""
        return self._output(self.engine.pop_finished(request_id))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; text is encoded with the tokenizer's own special tokens."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; pass tokenizer= to LLM, or token ids")
        return list(self.tokenizer(prompt)["input_ids"])

    def _output(self, request: Request) -> RequestOutput:
        assert request.finish_reason is not None
        assert request.finish_time is not None
        output_ids = request.output_token_ids
        text = self.tokenizer.decode(output_ids, skip_special_tokens=True) if self.tokenizer else ""
        first = request.first_token_time
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=output_ids,
            text=text,
            finish_reason=request.finish_reason,
            error=request.error,
            stats=request.stats,
            ttft=None if first is None else first - request.arrival_time,
            latency=request.finish_time - request.arrival_time,
            logprobs=request.logprobs,
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(
            f"sampling_params has {len(params)} entries for {count} prompts; give one each, or one"
        )
    return params


def _refused(prompt: Prompt, error: str) -> RequestOutput:
    return RequestOutput(
        request_id=-1,
        prompt_token_ids=[] if isinstance(prompt, str) else list(prompt),
        token_ids=[],
        text="",
        finish_reason=FinishReason.ERROR,
        error=error,
        stats=SpeculationStats(),
        ttft=None,
        latency=0.0,
    )


def _rates(outputs: Any, elapsed: float) -> str:
    finished = list(outputs)
    tokens = sum(len(output.token_ids) for output in finished)
    steps = sum(output.stats.num_steps for output in finished)
    emitted = sum(output.stats.num_emitted for output in finished)
    rate = f"{tokens / elapsed:.1f} tok/s" if elapsed else ""
    return f"{rate}, τ {emitted / steps:.2f}" if steps else rate
