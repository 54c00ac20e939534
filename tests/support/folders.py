"""A tiny random target as a Hugging Face folder, and studies on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_tests.models import tiny_lm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.core import SamplingParams
from specdec.data import DataConfig
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.evaluation.config import MeasurementConfig, StudyConfig, TargetConfig

EOS = "<eos>"
PROMPTS = ("def one(x):", "a b a b a b", "naïve café", "abcabcabc", "0123 0123")
SIZES = EngineConfig(block_size=4, num_kv_tokens=512, max_model_len=100)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token, so that characters often need several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, EOS])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


def save_target(folder: Path, seed: int = 0) -> Path:
    """Writes model and tokenizer."""
    tokenizer = byte_tokenizer()
    model = tiny_lm(seed=seed, vocab_size=len(tokenizer)).plain
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_prompts(path: Path, prompts: Sequence[str] = PROMPTS) -> Path:
    """Writes a JSONL file with ids p0, p1, ..."""
    lines = [json.dumps({"id": f"p{index}", "prompt": prompt}) for index, prompt in enumerate(prompts)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def make_study(folder: Path, speculative: SpeculativeConfig | None, **changes: Any) -> StudyConfig:
    """A study of the target in `folder / "target"` on the prompts in `folder / "prompts.jsonl"`."""
    parts: dict[str, Any] = {
        "target": TargetConfig(name=str(folder / "target"), dtype="float32"),
        "sampling": SamplingParams(temperature=0.0, max_tokens=12, seed=0),
        "data": DataConfig(name="jsonl", path=str(folder / "prompts.jsonl")),
        "engine": SIZES,
        "measurement": MeasurementConfig(warmup_tokens=2, resamples=200),
    }
    return StudyConfig(speculative=speculative, **{**parts, **changes})
