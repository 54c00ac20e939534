"""`LLM`: prompts in, completions out, and text that streams."""

from __future__ import annotations

import random

import pytest
import torch
from specdec_tests.models import GREEDY, tiny_lm
from specdec_tests.scripts import truth
from specdec_tests.serving import scripted, speculate
from specdec_tests.tokenizers import ByteTokenizer
from torch import Tensor

from specdec.core import SamplingParams
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.engine.detokenizer import IncrementalDetokenizer
from specdec.engine.llm import LLM
from specdec.engine.packing import PackedBatch
from specdec.engine.request import FinishReason

LM = tiny_lm(vocab_size=260, eos=(256,))
TEXTS = [
    "plain",
    "héllo wörld",
    "日本語 and 🙂🙃 mixed",
    "",
    "naïve → café",
    "🙂" * 9,
    "\ufffd kept",
    "a\u0301",
]


@pytest.fixture
def llm() -> LLM:
    return make_llm(speculate("self", tree_args={"num_tokens": 3}))


def make_llm(speculative: SpeculativeConfig | None = None) -> LLM:
    sizes = EngineConfig(block_size=4, num_blocks=128, max_num_seqs=3)
    return LLM(LM.target, speculative=speculative, engine=sizes, tokenizer=ByteTokenizer())


# Generate


def test_outputs_keep_the_order_of_prompts(llm):
    prompts = [[row + 1, 2, 3] for row in range(9)]
    params = [
        SamplingParams(temperature=0, max_tokens=3 + 2 * (row % 4), ignore_eos=True) for row in range(9)
    ]
    for prompt, own, output in zip(prompts, params, llm.generate(prompts, params), strict=True):
        assert output.prompt_token_ids == prompt
        assert output.token_ids == LM.greedy(prompt, own.max_tokens)
        assert output.text == ByteTokenizer().decode(output.token_ids, skip_special_tokens=True)
        assert output.finish_reason is FinishReason.LENGTH
        assert 0 < output.ttft <= output.latency


def test_one_prompt_may_come_alone(llm):
    for prompt in ("hi", [104, 105]):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.prompt_token_ids == [104, 105]
        assert output.token_ids == LM.greedy([104, 105], 40)


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [([], "empty"), ("", "empty"), ([1, 999], "holds 999"), ([1] * 200, "200 tokens")],
    ids=["no-ids", "no-text", "outside", "too-long"],
)
def test_a_refused_prompt_does_not_stop_the_others(llm, bad, message):
    outputs = llm.generate([[1, 2], bad, [3, 4]], GREEDY)
    assert [output.token_ids for output in outputs] == [LM.greedy([1, 2], 40), [], LM.greedy([3, 4], 40)]
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert message in outputs[1].error
    assert outputs[1].ttft is None


def test_all_prompts_may_be_refused(llm):
    assert [output.finish_reason for output in llm.generate([[], []], GREEDY)] == [FinishReason.ERROR] * 2


def test_text_without_a_tokenizer_is_refused():
    bare = LLM(LM.target, engine=EngineConfig(block_size=4, num_blocks=64))
    (output,) = bare.generate("hi", GREEDY)
    assert "a text prompt needs a tokenizer" in output.error
    (output,) = bare.generate([1, 2], GREEDY)
    assert output.text == ""
    assert output.token_ids == LM.greedy([1, 2], 40)


def test_params_must_fit_the_prompts(llm):
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY] * 2)


def test_temperature_is_refused_by_a_greedy_verifier():
    (warm, cold) = make_llm(speculate("self", verifier="greedy")).generate(
        [[1, 2], [1, 2]], [SamplingParams(), GREEDY]
    )
    assert "temperature=1.0" in warm.error
    assert cold.token_ids == LM.greedy([1, 2], 40)


@pytest.mark.timeout(60)
def test_generate_ends_when_a_request_is_aborted(llm):
    steps: list[int] = []

    def abort(result, kept) -> None:
        steps.append(1)
        if len(steps) == 3:
            llm.abort(result.requests[0].request_id)

    llm.engine.observers.append(abort)
    outputs = llm.generate([[1, 2], [3, 4]], GREEDY)
    assert outputs[0].finish_reason is FinishReason.ABORT
    assert outputs[0].token_ids == LM.greedy([1, 2], 40)[: len(outputs[0].token_ids)]
    assert outputs[1].token_ids == LM.greedy([3, 4], 40)


def test_generate_leaves_other_requests_alone(llm):
    number = llm.add_request([7, 8], SamplingParams(temperature=0, max_tokens=30))
    llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=5))
    while llm.engine.has_work:
        llm.step()
    assert llm.collect(number).token_ids == LM.greedy([7, 8], 30)


# Streaming


def say(llm: LLM, text: str) -> None:
    """Makes the greedy continuation of a one-token prompt a text, then EOS."""
    ids = [*text.encode(), 256]
    node_logits = llm.engine.target.node_logits

    def spoken(batch: PackedBatch, **options: int | None) -> Tensor:
        logits = torch.zeros_like(node_logits(batch, **options))
        positions = batch.select_nodes(batch.meta.positions)
        wanted = torch.tensor(ids)[positions.clamp(max=len(ids) - 1)]
        return logits.scatter_(1, wanted.unsqueeze(1), 1.0)

    llm.engine.target.node_logits = spoken


@pytest.mark.parametrize("drafted", [0, 1, 2, 3, 5], ids="drafts-{}".format)
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[1:-1] or "empty")
def test_chunks_make_the_text(text, drafted):
    ids = [*text.encode(), 256]
    config = scripted(lambda _, committed: ids[len(committed) - 1 :][:drafted]) if drafted else None
    llm = make_llm(config)
    say(llm, text)
    chunks, outputs = zip(*llm.stream([65], SamplingParams(temperature=0, max_tokens=100)), strict=True)
    assert "".join(chunks) == text
    assert [token for output in outputs for token in output.token_ids] == ids
    assert outputs[-1].finish_reason is FinishReason.STOP
    (whole,) = llm.generate([[65]], SamplingParams(temperature=0, max_tokens=100))
    assert whole.text == text
    assert whole.token_ids == ids


def test_a_character_cut_by_the_limit_is_released_at_the_end():
    llm = make_llm()
    say(llm, "a🙂")
    chunks = [chunk for chunk, _ in llm.stream([65], SamplingParams(temperature=0, max_tokens=3))]
    (whole,) = llm.generate([[65]], SamplingParams(temperature=0, max_tokens=3))
    assert "".join(chunks) == whole.text == "a\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_in_any_portions(seed):
    chooser = random.Random(seed)
    tokens = [
        token
        for _ in range(40)
        for token in chooser.choice([[chooser.randrange(256)], list("é🙂a語".encode()), [256]])
    ]
    detokenizer = IncrementalDetokenizer(ByteTokenizer())
    text, start = "", 0
    while start < len(tokens):
        size = chooser.randrange(1, 7)
        text += detokenizer.add(tokens[start : start + size], final=start + size >= len(tokens))
        start += size
    assert text == ByteTokenizer().decode(tokens, skip_special_tokens=True) == detokenizer.text


def test_a_stream_that_is_closed_frees_its_pages(llm):
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks


@pytest.mark.timeout(60)
def test_a_stream_ends_when_its_request_is_aborted(llm):
    tokens: list[int] = []
    for _, output in llm.stream([1, 2], GREEDY):
        tokens += output.token_ids
        llm.abort(output.request_id)
    assert tokens == LM.greedy([1, 2], len(tokens))


def test_streams_may_be_interleaved_with_requests():
    llm = make_llm(scripted(truth(LM, 2)))
    number = llm.add_request([9, 9], SamplingParams(temperature=0, max_tokens=10))
    tokens = [token for _, output in llm.stream([1, 2], GREEDY) for token in output.token_ids]
    assert tokens == LM.greedy([1, 2], 40)
    assert llm.collect(number).token_ids == LM.greedy([9, 9], 10)
