"""Sampled requests: reproducible by seed, whatever runs beside them, and distributed as the target says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from specdec_tests.laws import decode_law
from specdec_tests.models import TinyLM, tiny_lm
from specdec_tests.scripts import mixed_tree
from specdec_tests.serving import complete, make_engine, scripted, speculate, tokens_of
from specdec_tests.statistics import chi_square_p_value

from specdec.core import CounterRng, SamplingParams, Stream
from specdec.drafters.trees import draws as trees_draws
from specdec.drafters.trees.builder import TreeBuilder
from specdec.engine.config import SpeculativeConfig

LM = tiny_lm(scale=2.0)
DRAFT = tiny_lm(seed=1, scale=2.0)
SAMPLED = {"num_tokens": 4, "sample": True}
SPECULATIONS = {
    "plain": None,
    "ngram": speculate("ngram", "best_first"),
    "tree": scripted(mixed_tree(LM, 10), max_nodes=10),
    "small_lm": speculate("small_lm", drafter_args={"model": DRAFT.target}, tree_args=SAMPLED),
    "early_exit": speculate("early_exit", "static"),
    "token-sampled": speculate(
        "small_lm", verifier="token", drafter_args={"model": DRAFT.target}, tree_args=SAMPLED
    ),
    "token-tree": speculate("early_exit", "best_first", "token"),
}
PROMPTS = [[1, 2, 3], [4], [5, 6] * 8, [7, 8, 9, 10], [11] * 5]
PARAMS = [
    SamplingParams(seed=1, max_tokens=20),
    SamplingParams(seed=2, max_tokens=25, temperature=0.6, top_k=20),
    SamplingParams(seed=3, max_tokens=20, top_p=0.8),
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(seed=2**63 - 1, max_tokens=15, temperature=1.4, min_p=0.05),
]


@pytest.mark.parametrize("name", SPECULATIONS)
def test_batch_mates_change_nothing(name):
    together = tokens_of(make_engine(LM.target, SPECULATIONS[name]), PROMPTS, PARAMS)
    for prompt, params, tokens in zip(PROMPTS, PARAMS, together, strict=True):
        assert tokens_of(make_engine(LM.target, SPECULATIONS[name]), [prompt], params) == [tokens]
    # In another order, some of them waiting for their turn.
    engine = make_engine(LM.target, SPECULATIONS[name], max_num_seqs=2)
    assert tokens_of(engine, PROMPTS[::-1], PARAMS[::-1]) == together[::-1]


@pytest.mark.parametrize("name", ["ngram", "tree", "small_lm", "early_exit"])
def test_target_only_tokens_are_plain_decodings(name):
    plain = tokens_of(make_engine(LM.target), PROMPTS, PARAMS)
    assert tokens_of(make_engine(LM.target, SPECULATIONS[name]), PROMPTS, PARAMS) == plain


def test_plain_decoding_draws_with_the_position_s_coin():
    (tokens,) = tokens_of(make_engine(LM.target), PROMPTS[:1], PARAMS[:1])
    context = list(PROMPTS[0])
    rng, zero = CounterRng(torch.tensor([1])), torch.tensor([0])
    for token in tokens:
        coin = rng.uniform(zero, torch.tensor([len(context)]), zero, Stream.TARGET)
        cumulative = LM.probs(context, PARAMS[0]).double().cumsum(0)
        assert token == int(torch.searchsorted(cumulative, coin * cumulative[-1], right=True))
        context.append(token)


def test_seeds_matter_and_repeat():
    engine = make_engine(LM.target)
    first, again, other = tokens_of(
        engine, [[1, 2]] * 3, [SamplingParams(seed=seed, max_tokens=20) for seed in (5, 5, 6)]
    )
    assert first == again != other


def test_requests_without_a_seed_differ_but_the_engine_repeats():
    runs = [
        tokens_of(make_engine(LM.target, seed=3), [[1, 2]] * 2, SamplingParams(max_tokens=20)) for _ in "12"
    ]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    assert tokens_of(make_engine(LM.target, seed=4), [[1, 2]] * 2, SamplingParams(max_tokens=20)) != runs[0]


@pytest.mark.parametrize("name", SPECULATIONS)
def test_tiny_temperature_is_greedy(name):
    greedy = SamplingParams(temperature=0, max_tokens=20)
    cold = SamplingParams(temperature=1e-9, max_tokens=20)
    engine = make_engine(LM.target, SPECULATIONS[name])
    assert tokens_of(engine, PROMPTS, cold) == tokens_of(engine, PROMPTS, greedy)


# The joint law of the first tokens on the real engine

VOCAB = 5
SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 32}
TARGET = tiny_lm(scale=2.5, **SMALL)
OTHER = tiny_lm(seed=4, scale=2.5, **SMALL)
PROMPT = [1, 3, 1, 3, 2, 1]
NUM_REQUESTS = 4000
NUM_TOKENS = 3
MIXES = {
    "plain": SamplingParams(max_tokens=4),
    "warm": SamplingParams(max_tokens=4, temperature=1.5, top_k=4),
    "nucleus": SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9),
}
PAIRS = {
    "token-sampled": speculate(
        "small_lm",
        verifier="token",
        drafter_args={"model": OTHER.target},
        tree_args={"num_tokens": 3, "sample": True},
    ),
    "token-best_first": speculate(
        "early_exit", "best_first", "token", drafter_args={"num_layers": 1}, tree_args={"num_nodes": 6}
    ),
    "token-static": speculate("early_exit", "static", "token", drafter_args={"num_layers": 1}),
    "target_only-ngram": speculate("ngram", "best_first", drafter_args={"max_n": 3}),
}


def law_of(lm: TinyLM, params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    return decode_law(lambda path: lm.probs([*PROMPT, *path], params), length)


def draws(speculative: SpeculativeConfig | None, params: SamplingParams) -> tuple[Counter, float]:
    """First tokens of many requests that share nothing but their prompt, and the acceptance rate."""
    engine = make_engine(TARGET.target, speculative, num_blocks=4096, max_num_seqs=256)
    requests = complete(engine, [PROMPT] * NUM_REQUESTS, params)
    accepted = sum(request.stats.num_accepted for request in requests)
    drafted = sum(request.stats.num_drafted for request in requests)
    tokens = Counter(tuple(request.output_token_ids[:NUM_TOKENS]) for request in requests)
    return tokens, accepted / max(drafted, 1)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("pair", PAIRS)
def test_joint_law(pair, mix):
    counts, acceptance = draws(PAIRS[pair], MIXES[mix])
    assert 0.02 < acceptance < 0.98, "the run says nothing about verification"
    assert chi_square_p_value(counts, law_of(TARGET, MIXES[mix], NUM_TOKENS)) > 1e-4


def test_joint_law_of_a_mixed_batch():
    """Requests with different parameters, interleaved in the same steps."""
    engine = make_engine(TARGET.target, PAIRS["token-sampled"], num_blocks=4096, max_num_seqs=256)
    names = [list(MIXES)[index % len(MIXES)] for index in range(NUM_REQUESTS)]
    requests = complete(engine, [PROMPT] * NUM_REQUESTS, [MIXES[name] for name in names])
    for mix, params in MIXES.items():
        counts = Counter(
            tuple(request.output_token_ids[:2])
            for name, request in zip(names, requests, strict=True)
            if name == mix
        )
        assert chi_square_p_value(counts, law_of(TARGET, params, 2)) > 1e-4


@pytest.mark.parametrize("bug", ["unwarped-q", "shared-coins", "argmax-as-sampled"])
def test_bugs_are_seen(monkeypatch, bug):
    """Negative controls: the same test on a broken engine fails."""
    params: SamplingParams = MIXES["nucleus"]
    if bug == "shared-coins":
        uniform = CounterRng.uniform
        monkeypatch.setattr(
            CounterRng,
            "uniform",
            lambda self, requests, positions, nodes, stream: uniform(
                self, requests, torch.zeros_like(positions), torch.zeros_like(nodes), Stream.DRAFT
            ),
        )
    elif bug == "unwarped-q":
        record_q = TreeBuilder.record_q
        monkeypatch.setattr(
            TreeBuilder,
            "record_q",
            lambda self, rows, nodes, q: record_q(
                self, rows, nodes, q.sqrt() / q.sqrt().sum(-1, keepdim=True)
            ),
        )
    else:
        monkeypatch.setattr(trees_draws, "sample", lambda weights, coins: weights.argmax(-1))
    counts, _ = draws(PAIRS["token-sampled"], params)
    assert chi_square_p_value(counts, law_of(TARGET, params, NUM_TOKENS)) < 1e-6
