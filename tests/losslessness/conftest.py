"""A tiny target, and subjects on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.core import SamplingParams
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.losslessness.subject import Subject
from specdec.losslessness.tiny import PROMPTS, tiny_target
from specdec.models.target import TargetModel


@pytest.fixture(scope="session")
def target() -> TargetModel:
    return tiny_target()


@pytest.fixture(scope="session")
def plain(target) -> Engine:
    sizes = EngineConfig(
        num_kv_tokens=2**15, max_num_seqs=512, max_num_batched_tokens=2**20, max_model_len=60
    )
    return Engine(target, sizes)


@pytest.fixture
def subject(target) -> Callable[..., Subject]:
    def make(
        drafter: str, tree: str, verifier: str, temperature: float = 1.0, **tree_args: object
    ) -> Subject:
        config = SpeculativeConfig(drafter=drafter, tree=tree, tree_args=tree_args, verifier=verifier)
        return Subject(target, config, SamplingParams(temperature=temperature), PROMPTS[:2])

    return make
