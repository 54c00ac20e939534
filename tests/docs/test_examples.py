"""The code shown in CONTRIBUTING.md runs: each example class decodes a tiny model to its greedy output."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.core import SamplingParams
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.engine.llm import LLM
from specdec.models.target import TargetModel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes each Python block to the file its first line names, and makes them importable."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, "an example starts with its file name"
        assert len(block.splitlines()) < 40, f"{name[1]} is too long for an example"
        (tmp_path / name[1]).write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()


@pytest.fixture
def target() -> TargetModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return TargetModel(model, name="tiny")


@pytest.mark.parametrize(
    "parts",
    [
        {"drafter": "bigram:BigramModel", "tree": "best_first"},
        {"drafter": "bigram:BigramModel", "tree": "chain"},
        {"drafter": "early_exit", "tree": "comb:CombProposer"},
        {"drafter": "ngram", "verifier": "stopping:FirstTokenVerifier"},
    ],
    ids=lambda parts: "-".join(parts.values()),
)
@pytest.mark.usefixtures("examples")
def test_example_decodes_losslessly(target: TargetModel, parts: dict[str, str]) -> None:
    engine = EngineConfig(block_size=4, num_blocks=128)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[1, 2, 3, 1, 2], [4], [5, 6] * 5]
    plain = LLM(target, engine=engine).generate(prompts, params)
    drafted = LLM(target, engine=engine, speculative=SpeculativeConfig(**parts)).generate(prompts, params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(output.stats.num_drafted for output in drafted) > 0
