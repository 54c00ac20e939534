"""The oracle of quantised models: transformers' own model with each linear weight rounded in place."""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from transformers import PreTrainedModel

from specdec.models.quantisation import Rounding


def rounded_twin(model: PreTrainedModel, rounding: Rounding) -> PreTrainedModel:
    """A copy whose linear layers, the head included, hold rounded weights; a tied embedding is not rounded."""
    twin = deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(rounding.round(module.weight.detach()).dequantise())
    return twin
