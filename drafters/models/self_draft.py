"""Self-drafting: the target drafts for itself, on a second cache. Greedy drafts are all accepted.

It is the strongest cheap test of an engine and an upper bound for studies: acceptance below 100 % at
temperature 0 means a cache, a position or a mask is wrong, or rounding differs between one row and many.
"""

from __future__ import annotations

from typing import Self

from specdec.drafters.base import DrafterContext
from specdec.drafters.models.small_lm import SmallLMModel
from specdec.engine.model_runner import ModelRunner


class SelfDraftModel(SmallLMModel):
    """The target itself as drafter, weights shared, on a second cache; for tests and upper bounds."""

    @classmethod
    def build(cls, context: DrafterContext) -> Self:  # type: ignore[override]
        target = context.target
        return cls(ModelRunner(target.model, target.num_blocks, target.block_size))
