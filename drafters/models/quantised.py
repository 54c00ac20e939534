"""Quantised self-drafting: the target with its weights rounded to 4 or 8 bits drafts for itself.

It needs no checkpoint, agrees with the target more often than early exit does, and is faster than the target
where products with the packed weights are: on a CPU (see `models.quantisation`; elsewhere it only agrees), for the
few rows of a draft. At 4 bits its own prefill of a long prompt takes about twice the target's. Its keys and values
differ from the target's, so it keeps a cache of its own.
Source: QSpec, arXiv:2410.11305, which shares the cache and quantises activations too.
"""

from __future__ import annotations

import logging
from typing import Self

from specdec.drafters.base import DrafterContext
from specdec.drafters.models.small_lm import SmallLMModel
from specdec.engine.model_runner import ModelRunner
from specdec.models.quantisation import Rounding, has_kernels

logger = logging.getLogger(__name__)


class QuantisedModel(SmallLMModel):
    """The target with its weights rounded to 4 or 8 bits, on a paged cache of its own."""

    @classmethod
    def build(  # type: ignore[override]
        cls, context: DrafterContext, bits: int = 4, group_size: int | None = None
    ) -> Self:
        target = context.target
        model = target.model.quantised(Rounding(bits, group_size))
        if not has_kernels(model.device, model.dtype):
            logger.warning(
                "No %d-bit kernel for %s on %s: the draft model is rounded but no faster than the target.",
                bits,
                model.dtype,
                model.device,
            )
        return cls(ModelRunner(model, target.num_blocks, target.block_size))
