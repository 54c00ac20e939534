"""Running the engine: every step checks the pages, and every run must give the whole pool back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core import SamplingParams
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.engine.model_runner import ModelRunner
from specdec.engine.request import Request, StepOutput
from specdec.models.target import TargetModel


def speculate(
    drafter: str, tree: str = "chain", verifier: str = "target_only", **args: Any
) -> SpeculativeConfig:
    """A `SpeculativeConfig`; `drafter_args`, `tree_args` and the like go through."""
    return SpeculativeConfig(drafter=drafter, tree=tree, verifier=verifier, **args)


def scripted(script: Any, verifier: str = "target_only", max_nodes: int = 8) -> SpeculativeConfig:
    """A drafter that proposes what the script says."""
    return speculate("scripted", verifier=verifier, drafter_args={"script": script, "max_nodes": max_nodes})


def make_engine(
    target: TargetModel, speculative: SpeculativeConfig | None = None, *, poison: bool = True, **sizes: Any
) -> Engine:
    """An engine on a small pool; poisoned pages hold NaN, so that reading a slot nobody wrote shows."""
    engine = Engine(target, EngineConfig(**{"block_size": 4, "num_blocks": 128, **sizes}), speculative)
    if poison:
        for runner in (engine.target, draft_runner(engine)):
            if runner is not None:
                runner.kv.fill_(float("nan"))
    return engine


def draft_runner(engine: Engine) -> ModelRunner | None:
    """The draft model's own cache; None if it has none."""
    model = getattr(engine.speculation and engine.speculation.drafter, "model", None)
    return getattr(model, "runner", None)


def drain(engine: Engine, after_step: Callable[[list[StepOutput]], None] | None = None) -> list[StepOutput]:
    """Steps until nothing is left; all outputs in order."""
    outputs: list[StepOutput] = []
    while engine.has_work:
        step = engine.step()
        outputs += step
        if after_step is not None:
            after_step(step)
        engine.check_integrity()
    assert engine.blocks.num_free == engine.blocks.num_blocks, "pages were lost"
    return outputs


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[Request]:
    """Finished requests, in the order of the prompts."""
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    numbers = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    drain(engine)
    return [engine.pop_finished(number) for number in numbers]


def tokens_of(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """Output tokens, in the order of the prompts."""
    return [request.output_token_ids for request in complete(engine, prompts, params)]


def cached_rows(kv: Tensor, blocks: Sequence[int], block_size: int, count: int) -> Tensor:
    """`[layers, 2, count, kv_heads, head_dim]`, what the first `count` positions of a request hold in a pool."""
    positions = torch.arange(count)
    pages = torch.tensor(list(blocks))[positions // block_size]
    return kv[:, :, pages, positions % block_size]
