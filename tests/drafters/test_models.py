"""Draft models: what they predict, against obvious readings of their definitions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_tests.laws import draft_batch
from specdec_tests.models import GREEDY, tiny_lm
from specdec_tests.serving import complete, drain, make_engine, scripted, speculate

from specdec.core import CounterRng, SamplingParams
from specdec.drafters.base import DraftBatch, DraftModel
from specdec.drafters.models.ngram import NGramModel
from specdec.drafters.models.scripted import ScriptedDrafter
from specdec.drafters.trees.builder import Frontier, TreeBuilder
from specdec.drafters.trees.chain import ChainProposer
from specdec.engine.step import StepResult

VOCAB = 9
LM = tiny_lm()


def batch_of(*texts: Sequence[int], max_depth: int = 100) -> DraftBatch:
    batch = draft_batch([SamplingParams()] * len(texts), CounterRng(torch.arange(len(texts))), max_depth)
    return replace(
        batch,
        token_ids=[list(text) for text in texts],
        roots=torch.tensor([text[-1] for text in texts]),
        root_positions=torch.tensor([len(text) - 1 for text in texts]),
    )


def frontier_at(batch: DraftBatch, paths: Sequence[Sequence[int]]) -> Frontier:
    """One node a request, each at the end of a path of drafted tokens."""
    builder = TreeBuilder(batch, capacity=max(map(len, paths)))
    nodes = [0] * len(paths)
    for row, path in enumerate(paths):
        for token in path:
            (nodes[row],) = builder.add([row], [nodes[row]], torch.tensor([token]), torch.zeros(1))
    return builder.frontier(range(len(paths)), nodes)


# N-gram


def lookup(text: list[int], path: list[int], max_n: int, min_n: int) -> dict[int, float]:
    """The definition: longest suffix that has a continuation; the latest eight weigh 1/2, 1/4, …"""
    whole = text + path
    for n in range(min(max_n, len(whole)), min_n - 1, -1):
        suffix = whole[-n:]
        followers = [text[end] for end in range(n, len(text)) if text[end - n : end] == suffix]
        if followers:
            weights: dict[int, float] = {}
            for rank, token in enumerate(followers[::-1][:8]):
                weights[token] = weights.get(token, 0.0) + 0.5 ** (rank + 1)
            return {token: weight / sum(weights.values()) for token, weight in weights.items()}
    return {}


texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.integers(0, 3), max_size=5), st.integers(1, 4), st.integers(0, 3))
def test_ngram_equals_a_search_of_the_text(text, path, min_n, more):
    max_n = min_n + more
    model = NGramModel(max_n, min_n, vocab_size=VOCAB)
    for end in sorted({1, len(text) // 2 or 1, len(text)}):
        # The index grows with the text, as it does over the steps of a request.
        model.extend(batch_of(text[:end]))
    expected = lookup(text, path, max_n, min_n)
    batch = batch_of(text)
    tokens, log_q = model.top_k(frontier_at(batch, [path]), k=5)
    found = {token: q for token, q in zip(tokens[0].tolist(), log_q[0].exp().tolist(), strict=True) if q > 0}
    assert found == pytest.approx(expected)
    assert log_q[0].tolist() == sorted(log_q[0].tolist(), reverse=True)
    q = model.expand(frontier_at(batch, [path])).softmax(-1)[0]
    if expected:
        assert {token: float(q[token]) for token in range(VOCAB) if q[token] > 0} == pytest.approx(expected)
    else:
        assert q.tolist() == pytest.approx([1 / VOCAB] * VOCAB)


def marginals_by_definition(text: list[int], max_n: int, min_n: int, depth: int) -> list[dict[int, float]]:
    """What follows each of the latest eight occurrences of the longest suffix when the text is copied onwards."""
    levels: list[dict[int, float]] = [{} for _ in range(depth)]
    for n in range(min(max_n, len(text)), min_n - 1, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        for rank, end in enumerate(ends[::-1][:8]):
            copy = list(text)
            for level in range(depth):
                copy.append(copy[end + level])
                levels[level][copy[-1]] = levels[level].get(copy[-1], 0.0) + 0.5 ** (rank + 1)
        if ends:
            break
    return [{t: weight / sum(level.values()) for t, weight in level.items()} for level in levels]


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_ngram_marginals_equal_copying_the_text(text, min_n, more, depth):
    model = NGramModel(min_n + more, min_n, vocab_size=VOCAB)
    batch = batch_of(text, [5])
    model.extend(batch)
    logits = model.marginals(batch, depth)
    assert logits.shape == (2, depth, VOCAB)
    assert bool((logits[1] == float("-inf")).all()), "one token has no continuation"
    for row, expected in zip(
        logits[0], marginals_by_definition(text, min_n + more, min_n, depth), strict=True
    ):
        q = row.softmax(-1) if expected else torch.zeros(VOCAB)
        found = {token: float(q[token]) for token in range(VOCAB) if q[token] > 0}
        assert found == pytest.approx(expected)
        assert bool((row[q == 0] == float("-inf")).all())


def test_ngram_marginals_at_the_root_are_its_conditionals():
    batch = batch_of([1, 2, 3, 1, 4, 1, 2, 1])
    model = NGramModel(3, 1, vocab_size=VOCAB)
    model.extend(batch)
    root = model.expand(frontier_at(batch, [[]])).softmax(-1)
    torch.testing.assert_close(model.marginals(batch, 1)[:, 0].softmax(-1), root)


def test_ngram_marginals_stop_at_an_eos():
    model = NGramModel(3, 1, vocab_size=VOCAB, eos_token_ids=[8])
    batch = batch_of([1, 8, 5, 1, 2, 3, 1])
    model.extend(batch)
    found = [
        sorted((row > float("-inf")).nonzero().squeeze(1).tolist()) for row in model.marginals(batch, 3)[0]
    ]
    assert found == [[2, 8], [3], [1]]


def test_ngram_keeps_requests_apart_and_forgets():
    model = NGramModel(3, 1, vocab_size=VOCAB)
    batch = batch_of([1, 2, 1], [1, 3, 1])
    model.extend(batch)
    tokens, _ = model.top_k(frontier_at(batch, [[], []]), k=1)
    assert tokens.tolist() == [[2], [3]]
    model.free([0])
    assert list(model._indices) == [1]
    model.extend(batch_of([1, 5, 1]))
    assert model.top_k(frontier_at(batch_of([1, 5, 1]), [[]]), k=1)[0].tolist() == [[5]]


def test_ngram_stops_at_an_eos_it_has_drafted():
    model = NGramModel(3, 1, vocab_size=VOCAB, eos_token_ids=[8])
    batch = batch_of([1, 2, 8, 5, 1, 2])
    model.extend(batch)
    tree = ChainProposer(4).propose(model, batch, [4])
    assert tree.tokens.tolist() == [2, 8]


def test_ngram_finds_generated_text():
    """The output repeats itself though the prompt does not."""
    lm = tiny_lm(scale=1.0)
    prompt = [1, 2, 3]
    output = lm.greedy(prompt, 40)
    assert len(set(output)) < 20, "the model does not repeat itself"
    (request,) = complete(make_engine(lm.target, speculate("ngram")), [prompt], GREEDY)
    assert request.output_token_ids == output
    assert request.stats.acceptance_rate > 0.5


# Scripted


@pytest.mark.parametrize(
    ("entries", "budget", "max_depth", "expected"),
    [
        ([5, 6, 7], 9, 9, [(5, -1 + 1), (6, 1), (7, 2)]),
        ([5, 6, 7], 2, 9, [(5, 0), (6, 1)]),
        ([5, 6, 7], 9, 1, [(5, 0)]),
        ([5, 6, 7], 0, 9, []),
        ([(1, 0), (2, 1), (3, 0), (4, 3), (5, 2)], 9, 2, [(1, 0), (2, 1), (3, 0), (4, 3)]),
        ([(1, 0), (2, 1), (3, 0), (4, 3)], 9, 1, [(1, 0), (3, 0)]),
        ([(1, 0), (2, 1), (3, 2), (4, 0), (5, 4)], 9, 2, [(1, 0), (2, 1), (4, 0), (5, 3)]),
        ([], 9, 9, []),
    ],
)
def test_scripts_are_clipped_to_budget_and_depth(entries, budget, max_depth, expected):
    drafter = ScriptedDrafter(lambda request, committed: entries, max_nodes=9)
    tree = drafter.propose(batch_of([3, 4], max_depth=max_depth), [budget])
    tree.validate()
    assert list(zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True)) == expected


def test_scripts_see_the_request_and_its_text():
    seen: list[tuple[int, list[int]]] = []

    def script(request: int, committed: Sequence[int]) -> list[int]:
        seen.append((request, list(committed)))
        return []

    (request,) = complete(make_engine(LM.target, scripted(script)), [[4, 5]], GREEDY)
    assert seen == [(0, request.token_ids[:length]) for length in range(3, 41)]


def test_a_script_may_be_a_list():
    drafter = ScriptedDrafter([5, 6])
    assert drafter.propose(batch_of([1], [2]), [8, 1]).tokens.tolist() == [1, 5, 6, 2, 5]


# Models on the paged core


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("tree", ["chain", "static", "best_first"])
def test_early_exit_is_the_model_with_fewer_layers(num_layers, tree):
    """Every node's score is the sum of log q of a plain model that has only the first layers."""
    shallow = tiny_lm().plain
    engine = make_engine(
        LM.target, speculate("early_exit", tree, drafter_args={"num_layers": num_layers}), block_size=4
    )
    layers = shallow.model.layers
    trees: list[StepResult] = []
    engine.observers.append(lambda result, kept: trees.append(result))
    for prompt in ([1, 2, 3, 4, 5], [6] * 9):
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=8))
    roots: list[list[list[int]]] = []
    schedule = engine.scheduler.schedule

    def remember(node_cap: int):
        scheduled = schedule(node_cap)
        roots.append([list(request.token_ids) for request in scheduled[0]])
        return scheduled

    engine.scheduler.schedule = remember
    drain(engine)
    checked = 0
    shallow.model.layers = layers[:num_layers]
    try:
        for result, texts in zip(trees, roots, strict=True):
            checked += check_scores(result, texts, shallow)
    finally:
        shallow.model.layers = layers
    assert checked >= 10


@torch.inference_mode()
def check_scores(result: StepResult, texts: list[list[int]], model: torch.nn.Module) -> int:
    tree, checked = result.tree, 0
    if tree.score is None:
        return 0
    for row, text in enumerate(texts):
        start = tree.host_offsets[row]
        for path in tree.paths(row):
            tokens = [int(tree.tokens[start + node]) for node in path]
            whole = torch.tensor([text + tokens[1:]])
            log_q = model(input_ids=whole, use_cache=False).logits[0].log_softmax(-1)
            score = 0.0
            for depth, (node, token) in enumerate(zip(path[1:], tokens[1:], strict=True)):
                score += float(log_q[len(text) - 1 + depth, token])
                assert float(tree.score[start + node]) == pytest.approx(score, abs=1e-3)
                checked += 1
    return checked


def test_self_draft_shares_the_weights_but_not_the_cache():
    engine = make_engine(LM.target, speculate("self"))
    runner = engine.speculation.drafter.model.runner
    assert runner.model is LM.target
    assert runner.kv.data_ptr() != engine.target.kv.data_ptr()
    assert engine.kv_bytes == 2 * engine.target.kv_bytes


def test_early_exit_needs_no_cache():
    engine = make_engine(LM.target, speculate("early_exit"))
    assert engine.kv_bytes == engine.target.kv_bytes


@pytest.mark.parametrize("seed", range(3))
def test_draft_cache_keeps_up_when_speculation_pauses(seed):
    """Steps without drafting leave tokens for the draft model to catch up on."""
    chooser = random.Random(seed)
    engine = make_engine(LM.target, speculate("self", tree_args={"num_tokens": 3}))
    engine._node_cap = lambda: chooser.choice([0, 3, 3])
    requests = complete(engine, [[1, 2, 3], [4] * 7], SamplingParams(temperature=0, max_tokens=60))
    for prompt, request in zip(([1, 2, 3], [4] * 7), requests, strict=True):
        assert request.output_token_ids == LM.greedy(prompt, 60)
        assert request.stats.acceptance_rate == 1.0
        assert request.stats.num_drafted > 0


def test_a_draft_model_with_a_shorter_context():
    """It is refused unless no request can outgrow it; up to its last position it drafts."""
    target = tiny_lm("gpt2", max_position_embeddings=96)
    draft = tiny_lm("gpt2", seed=1, max_position_embeddings=32)
    config = speculate("small_lm", drafter_args={"model": draft.target})
    with pytest.raises(
        ValueError, match="context of 32 tokens, requests may reach 96: set engine.max_model_len=32"
    ):
        make_engine(target.target, config)
    engine = make_engine(target.target, config, max_model_len=32)
    (request,) = complete(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=None))
    assert request.output_token_ids == target.greedy([1, 2, 3], 29)


def test_ties_are_settled_as_the_target_settles_them():
    """Low-precision logits tie; a self-draft must still agree with the target's argmax."""
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(0)).mul(2).round().bfloat16()
    texts = [[row] for row in range(40)]

    class Tied(DraftModel):
        def expand(self, frontier: Frontier) -> torch.Tensor:
            return logits

    tokens, _ = Tied().top_k(frontier_at(batch_of(*texts), [[]] * 40), 1)
    assert torch.equal(tokens.squeeze(1), logits.argmax(-1))
