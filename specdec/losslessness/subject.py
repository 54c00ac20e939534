"""The combination under check, on engines that all checks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from specdec.core import ProposalLaw, SamplingParams
from specdec.engine.config import NO_DRAFTER, EngineConfig, SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.engine.step import StepResult
from specdec.losslessness.controls import Conditions
from specdec.losslessness.law import Tokens
from specdec.losslessness.serving import decode, seeded, tokens_of
from specdec.models.target import TargetModel
from specdec.verifiers.base import Verifier

MAX_OUTPUT = 40
"""Tokens that a request of a check decodes at most."""
_LARGEST_BATCH = 512
_POOL_BYTES = 512 * 2**20
_LOGIT_BYTES = 256 * 2**20
_BLOCK_SIZE = 8


class Subject:
    """A target with one way to speculate, and the same target decoding plainly.

    Args:
        target: the model.
        speculative: drafter, tree and verifier.
        sampling: how tokens are drawn; limits, stop ids and seeds are the checks' own.
        prompts: short prompts as token ids.
        plain: an engine of the same sizes that decodes plainly; None makes one.

    Raises:
        ValueError: the parts don't fit each other.
    """

    def __init__(
        self,
        target: TargetModel,
        speculative: SpeculativeConfig,
        sampling: SamplingParams,
        prompts: Sequence[Sequence[int]],
        plain: Engine | None = None,
    ) -> None:
        if not prompts:
            raise ValueError("prompts is empty; a check needs at least one")
        self.target = target
        self.config = speculative
        self.prompts = [tuple(prompt) for prompt in prompts]
        self.sizes = engine_sizes(target, max(map(len, prompts)))
        self.engine = Engine(target, self.sizes, speculative)
        self.plain = plain or Engine(target, self.sizes)
        # A rule of temperature 0 is checked there, whatever was asked for.
        greedy = replace(sampling, temperature=0.0)
        self.sampling = greedy if self.verifier.greedy_only else sampling

    @property
    def verifier(self) -> Verifier:
        assert self.engine.speculation is not None
        return self.engine.speculation.verifier

    @property
    def law(self) -> ProposalLaw:
        assert self.engine.drafter is not None
        return self.engine.drafter.law

    @property
    def max_nodes(self) -> int:
        return self.engine.max_nodes

    @property
    def is_greedy(self) -> bool:
        return self.sampling.is_greedy

    @cached_property
    def alike(self) -> Engine:
        """Plain decoding with the verifier's own way of drawing."""
        return Engine(self.target, self.sizes, replace(self.config, drafter=NO_DRAFTER, drafter_args={}))

    @cached_property
    def wave(self) -> int:
        """Requests decoded together: as many as pool and logits have room for."""
        longest = max(map(len, self.prompts)) + MAX_OUTPUT + self.max_nodes
        pages = self.engine.blocks.blocks_for(longest)
        rows = _LOGIT_BYTES // (4 * self.target.vocab_size * (1 + self.max_nodes))
        return max(1, min(_LARGEST_BATCH, self.engine.blocks.num_blocks // pages, rows))

    def draw(
        self, engine: Engine, prompt: Sequence[int], params: SamplingParams, seeds: Sequence[int], length: int
    ) -> list[Tokens]:
        """The first `length` tokens for each seed, from trees as large as in the middle of a long output."""
        own = seeded(params, seeds, max_tokens=min(length + self.max_nodes, MAX_OUTPUT))
        return tokens_of(decode(engine, [prompt] * len(own), own, enough=length, wave=self.wave), length)

    @cached_property
    def conditions(self) -> Conditions:
        """Measured on a few requests: how far q is from p."""
        distances: list[Tensor] = []

        def measure(result: StepResult, _num_kept: Sequence[int]) -> None:
            tree = result.tree
            if tree.q is not None and tree.q_row is not None:
                drawn = (tree.q_row >= 0).nonzero().squeeze(1)
                gap = (result.p.rows(drawn) - tree.q[tree.q_row[drawn]]).abs().sum(-1) / 2
                distances.append(gap)

        self.engine.observers.append(measure)
        try:
            for prompt in self.prompts:
                self.draw(self.engine, prompt, self.sampling, range(8), length=3)
        finally:
            self.engine.observers.remove(measure)
        gaps = [gap for part in distances for gap in part.tolist()]
        return Conditions(
            law=self.law,
            reproduces=self.verifier.reproduces,
            distance=sum(gaps) / len(gaps) if gaps else None,
        )


def engine_sizes(target: TargetModel, longest_prompt: int) -> EngineConfig:
    """Many short requests at once, on small pages."""
    length = min(longest_prompt + MAX_OUTPUT, target.max_context)
    tokens = min(_LARGEST_BATCH * 2 * length, _POOL_BYTES // target.kv_spec.bytes_per_token)
    return EngineConfig(
        block_size=_BLOCK_SIZE,
        num_kv_tokens=max(tokens, 4 * length),
        max_num_seqs=_LARGEST_BATCH,
        max_num_batched_tokens=2**20,
        max_model_len=length,
    )
