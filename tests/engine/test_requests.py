"""Where a request ends, and which requests are refused, by name and with a remedy."""

from __future__ import annotations

import pytest
from specdec_tests.models import GREEDY, tiny_lm
from specdec_tests.scripts import mixed_tree, truth
from specdec_tests.serving import complete, drain, make_engine, scripted, speculate

from specdec.core import ProposalLaw, SamplingParams
from specdec.drafters.models.scripted import ScriptedDrafter
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.engine.request import FinishReason, TokenOrigin

PROMPT = [3, 1, 4, 1, 5]
LM = tiny_lm()
ORACLE = LM.greedy(PROMPT, 40)
FRESH = [index for index, token in enumerate(ORACLE[:20]) if token not in ORACLE[:index]]
SPECULATIONS = {
    "plain": None,
    "right": scripted(truth(LM, 5)),
    "tree": scripted(mixed_tree(LM, 10), "token", max_nodes=10),
    "self": speculate("self", tree_args={"num_tokens": 3}),
    "ngram": speculate("ngram", "best_first", "token"),
}


@pytest.fixture(params=SPECULATIONS)
def speculation(request) -> SpeculativeConfig | None:
    return SPECULATIONS[request.param]


# Ends


@pytest.mark.parametrize("index", FRESH[:8])
def test_eos_at_any_place(speculation, index):
    lm = tiny_lm(eos=(ORACLE[index],))
    engine = make_engine(lm.target, speculation)
    number = engine.add_request(PROMPT, GREEDY)
    outputs = drain(engine)
    request = engine.pop_finished(number)
    assert request.output_token_ids == ORACLE[: index + 1]
    assert request.finish_reason is FinishReason.STOP
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.STOP]
    assert [token for output in outputs for token in output.token_ids] == ORACLE[: index + 1]
    assert request.stats.num_accepted <= index


def test_stop_ids_hold_even_when_eos_is_ignored(speculation):
    eos, stop = ORACLE[FRESH[2]], ORACLE[FRESH[4]]
    engine = make_engine(tiny_lm(eos=(eos, 99)).target, speculation)
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,)),
        SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(stop,)),
    ]
    ignoring, stopped, both = complete(engine, [PROMPT] * 3, params)
    assert ignoring.output_token_ids == ORACLE
    assert ignoring.finish_reason is FinishReason.LENGTH
    assert stopped.output_token_ids == ORACLE[: FRESH[4] + 1]
    assert both.output_token_ids == ORACLE[: FRESH[2] + 1]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
def test_max_tokens(speculation, count):
    params = SamplingParams(temperature=0, max_tokens=count)
    (request,) = complete(make_engine(LM.target, speculation), [PROMPT], params)
    assert request.output_token_ids == ORACLE[:count]
    assert request.finish_reason is FinishReason.LENGTH
    assert request.stats.num_emitted == count - 1


def test_eos_as_the_last_allowed_token_is_a_stop(speculation):
    index = FRESH[3]
    params = SamplingParams(temperature=0, max_tokens=index + 1)
    (request,) = complete(make_engine(tiny_lm(eos=(ORACLE[index],)).target, speculation), [PROMPT], params)
    assert request.output_token_ids == ORACLE[: index + 1]
    assert request.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("length", range(24, 32))
def test_context_limit(speculation, length):
    prompt = [(7 * index) % 50 for index in range(length)]
    engine = make_engine(LM.target, speculation, max_model_len=32, num_blocks=16)
    (request,) = complete(engine, [prompt], SamplingParams(temperature=0, max_tokens=None))
    assert len(request.token_ids) == 32
    assert request.output_token_ids == LM.greedy(prompt, 32 - length)
    assert request.finish_reason is FinishReason.LENGTH


def test_origins_say_where_tokens_came_from():
    engine = make_engine(LM.target, scripted(lambda _, committed: [LM.greedy(committed, 1)[0], (100, 1)]))
    engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=6))
    outputs = drain(engine)
    accepted, correction = TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION
    assert [output.origins for output in outputs] == [
        [TokenOrigin.PREFILL],
        [accepted, correction],
        [accepted, correction],
        [TokenOrigin.BONUS],
    ]


# Refusals


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt_token_ids is empty; give at least one token"),
        ([1, 2, 101], "prompt_token_ids holds 101; ids of 'tiny-llama-0' are 0 to 100: .* another tokenizer"),
        ([-1], "prompt_token_ids holds -1"),
        ([1] * 128, "128 tokens and max_model_len=128: no room .* shorten the prompt or raise"),
        ([1] * 300, "300 tokens and max_model_len=128"),
    ],
    ids=["empty", "beyond-vocabulary", "negative", "full", "too-long"],
)
def test_bad_prompts(prompt, message):
    engine = make_engine(LM.target)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt)
    assert not engine.has_work
    assert complete(engine, [PROMPT], GREEDY)[0].output_token_ids == ORACLE


def test_temperature_with_a_greedy_verifier():
    engine = make_engine(LM.target, speculate("ngram", verifier="greedy"))
    with pytest.raises(ValueError, match="temperature=0.7: .* temperature 0 only; .* target_only, token"):
        engine.add_request(PROMPT, SamplingParams(temperature=0.7))


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        (speculate("ngrm"), "unknown drafter 'ngrm'; did you mean 'ngram'\\? Known: early_exit, ngram"),
        (
            speculate("ngram", "chian"),
            "unknown tree 'chian'; did you mean 'chain'\\? Known: best_first, chain",
        ),
        (speculate("ngram", verifier="tokens"), "unknown verifier 'tokens'; did you mean 'token'\\?"),
        (
            speculate("ngram", drafter_args={"n": 3}),
            "drafter 'ngram': .*'n'; its arguments are: max_n, min_n",
        ),
        (
            speculate("ngram", tree_args={"depth": 3}),
            "tree 'chain': .*'depth'; its arguments are: num_tokens",
        ),
        (
            speculate("ngram", verifier_args={"k": 3}),
            "verifier 'token|target_only': .*its arguments are: none",
        ),
        (speculate("ngram", drafter_args={"min_n": 3, "max_n": 2}), "min_n=3, max_n=2: expected 1 <= min_n"),
        (speculate("ngram", tree_args={"num_tokens": 0}), "num_tokens=0: a chain needs at least 1"),
        (speculate("early_exit", drafter_args={"num_layers": 4}), "num_layers=4: the target has 3 layers"),
        (speculate("early_exit", drafter_args={"num_layers": 0}), "num_layers=0: the target has 3 layers"),
        (speculate("small_lm"), "small_lm needs model="),
        (
            speculate("small_lm", drafter_args={"model": tiny_lm(vocab_size=77).target}),
            "vocabulary of 77 ids, the target 'tiny-llama-0' of 101: .*choose a model of the same family",
        ),
        (speculate("scripted", drafter_args={"max_nodes": 0}), "max_nodes=0: expected max_nodes >= 1"),
    ],
)
def test_bad_speculation(speculative, message):
    with pytest.raises(ValueError, match=message):
        make_engine(LM.target, speculative)


@pytest.mark.parametrize("law", [ProposalLaw.IID, ProposalLaw.WITHOUT_REPLACEMENT], ids=lambda law: law.value)
def test_a_verifier_that_is_not_exact_for_the_law(monkeypatch, law):
    monkeypatch.setattr(ScriptedDrafter, "law", law)
    message = (
        f"verifier='token' is not exact for the {law.value} law of drafter='scripted'.*greedy, .*target_only"
    )
    with pytest.raises(ValueError, match=message):
        make_engine(LM.target, scripted([1], "token"))
    make_engine(LM.target, scripted([1], "target_only"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_blocks": 2}, "num_blocks=2: one request .* tree of 8 nodes needs 3 blocks; raise num_blocks"),
        ({"num_blocks": 12, "max_model_len": 64}, "max_model_len=64 with a tree of 8 nodes needs 18 blocks"),
        ({"max_model_len": 129}, "max_model_len=129: 'tiny-llama-0' has a context of 128 tokens"),
    ],
    ids=["tree", "length", "context"],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_engine(LM.target, scripted([1]), **sizes)


@pytest.mark.parametrize(
    "name",
    ["block_size", "num_blocks", "num_kv_tokens", "max_num_seqs", "max_num_batched_tokens", "max_model_len"],
)
def test_sizes_of_zero(name):
    with pytest.raises(ValueError, match=f"{name}=0: expected {name} >= 1"):
        EngineConfig(**{name: 0})


@pytest.mark.parametrize("caps", [{0: 1}, {4: -1}], ids=str)
def test_bad_node_caps(caps):
    with pytest.raises(ValueError, match="expected a batch size >= 1 and nodes >= 0"):
        speculate("ngram", max_nodes_by_batch=caps)


# Speculation by batch size


def test_nodes_are_capped_by_the_number_of_running_requests():
    config = speculate(
        "self", tree_args={"num_tokens": 6}, max_nodes_by_batch={2: 3, 4: 1, 5: 0}, verifier="greedy"
    )
    assert [config.node_cap(running, 6) for running in range(1, 7)] == [6, 3, 3, 1, 0, 0]
    engine = make_engine(LM.target, config)
    drafted: dict[int, set[int]] = {}
    engine.observers.append(
        lambda result, kept: drafted.setdefault(len(result.requests), set()).update(result.tree.num_drafted)
    )
    prompts = [[row, 3, row] for row in range(1, 7)]
    params = [SamplingParams(temperature=0, max_tokens=5 + row**2 * 2) for row in range(6)]
    for prompt, own, request in zip(prompts, params, complete(engine, prompts, params), strict=True):
        assert request.output_token_ids == LM.greedy(prompt, own.max_tokens)
    assert {running: max(nodes) for running, nodes in drafted.items()} == {6: 0, 5: 0, 4: 1, 3: 3, 2: 3, 1: 6}
