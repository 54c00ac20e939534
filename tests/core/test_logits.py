"""Bias, masks and penalties: against a slow reference, transformers' processors, and by hand."""

from __future__ import annotations

import pytest
import torch
from specdec_tests.laws import node_paths
from specdec_tests.options import OPTIONS, changed_row
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.core import SamplingBatch, SamplingParams, TokenHistory, TokenTree
from specdec.core.logits import change_logits, counts_after
from specdec.core.sampling import warp
from specdec.verifiers.base import TargetProbs

CPU = torch.device("cpu")
VOCAB = 101
PROMPT, OUTPUT, ENDS = [3, 9, 3, 27], [8, 2, 8, 50, 8], (6, 7, 60)
TREE = [(8, 0), (9, 0), (8, 1), (2, 2), (1, 3), (1, 1)]
NO_PATH = torch.empty(1, 0, dtype=torch.int64)
ZERO = torch.zeros(1, dtype=torch.int64)


def noise(rows: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def history(prompt=PROMPT, output=OUTPUT, vocab_size=VOCAB) -> TokenHistory:
    return TokenHistory(prompt, output, vocab_size=vocab_size, device=CPU, end_ids=ENDS)


def batch(*params: SamplingParams, histories: list[TokenHistory | None] | None = None) -> SamplingBatch:
    return SamplingBatch(params, CPU, [history() for _ in params] if histories is None else histories)


def tree_of(*trees: list[tuple[int, int]]) -> TokenTree:
    roots = torch.full((len(trees),), OUTPUT[-1])
    return TokenTree.from_lists(roots, trees, torch.full_like(roots, 8))


# Against the reference


@pytest.mark.parametrize("name", OPTIONS)
def test_every_node_sees_its_own_path(name):
    params, tree = SamplingParams(**OPTIONS[name]), tree_of(TREE)
    logits = noise(len(TREE) + 1)
    actual = TargetProbs(logits, tree, batch(params)).changed_logits
    for row, path in enumerate(node_paths(tree)[0]):
        expected = changed_row(logits[row], params, PROMPT, [*OUTPUT, *path], ENDS)
        torch.testing.assert_close(actual[row], expected, rtol=1e-6, atol=1e-6)


def test_a_batch_of_all_options_changes_each_row_as_alone():
    params = [SamplingParams(), *(SamplingParams(**options) for options in OPTIONS.values())]
    trees = [TREE[: row % 7] for row in range(len(params))]
    tree = tree_of(*trees)
    histories = [history([row], [row, 5]) if one.uses_history else None for row, one in enumerate(params)]
    logits = noise(len(tree.tokens)).bfloat16()
    together = TargetProbs(logits, tree, batch(*params, histories=histories))
    for row, one in enumerate(params):
        nodes = torch.arange(tree.host_offsets[row], tree.host_offsets[row + 1])
        alone = TargetProbs(logits[nodes], tree_of(trees[row]), batch(one, histories=[histories[row]]))
        assert torch.equal(together.changed_logits[nodes], alone.changed_logits.float())
        assert torch.equal(together.argmax[nodes], alone.argmax)
        assert torch.equal(together.rows(nodes), alone.rows(torch.arange(len(nodes))))


def test_target_and_drafter_use_the_same_warp():
    params, tree = SamplingParams(**OPTIONS["all"]), tree_of(TREE)
    logits = noise(len(TREE) + 1)
    p = TargetProbs(logits, tree, batch(params))
    q = warp(logits, batch(params), torch.zeros(len(logits), dtype=torch.int64), tree.path_tokens)
    assert torch.equal(p.rows(torch.arange(len(logits))), q)
    assert q.sum(-1).tolist() == pytest.approx([1.0] * len(q))


def test_paths_hold_the_tokens_down_to_each_node():
    tree = tree_of(TREE, [], [(4, 0)], [(5, 0), (6, 1), (7, 2), (8, 3)])
    expected = [list(path) for paths in node_paths(tree) for path in paths]
    assert [[token for token in path if token >= 0] for path in tree.path_tokens.tolist()] == expected
    assert tree.path_tokens.shape == (len(tree.tokens), 4)
    assert tree_of([], []).path_tokens.shape == (2, 0)


# Against transformers


def with_transformers(logits: Tensor, params: SamplingParams, num_output: int) -> Tensor:
    known = torch.tensor([[*PROMPT, *OUTPUT[:num_output]]])
    chain = LogitsProcessorList()
    if params.logit_bias:
        chain.append(
            SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()})
        )
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        chain.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, list(ENDS)))
    if params.banned_token_ids:
        chain.append(SuppressTokensLogitsProcessor(list(params.banned_token_ids)))
    chain.append(TemperatureLogitsWarper(params.temperature))
    chain.append(TopKLogitsWarper(params.top_k or VOCAB))
    chain.append(TopPLogitsWarper(params.top_p))
    chain.append(MinPLogitsWarper(params.min_p))
    return chain(known, logits).softmax(-1)


@pytest.mark.parametrize("num_output", [0, 4, 5])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"logit_bias": {3: 4.0, 8: -5.0}},
        {"banned_token_ids": (1, 2, 3, 100)},
        {"min_tokens": 5},
        {
            "repetition_penalty": 1.2,
            "logit_bias": {27: 2.0, 60: 9.0},
            "banned_token_ids": (8, 11),
            "min_tokens": 5,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.02,
        },
    ],
    ids=lambda options: "+".join(options),
)
def test_equals_transformers(options, temperature, num_output):
    params, logits = SamplingParams(temperature=temperature, **options), noise(1)
    own = history(output=OUTPUT[:num_output])
    actual = warp(logits, batch(params, histories=[own]), ZERO, NO_PATH)
    torch.testing.assert_close(actual, with_transformers(logits, params, num_output), rtol=1e-5, atol=1e-6)


# By hand


def test_counts_of_drafted_tokens():
    """C12's white box: history {5: 1}, drafts [7, 7]."""
    sampling = batch(SamplingParams(frequency_penalty=1.0), histories=[history([1], [5], 10)])
    own, paths = torch.zeros(3, dtype=torch.int64), tree_of([(7, 0), (7, 1)]).path_tokens
    counts = counts_after(sampling, own, paths, torch.arange(10).expand(3, -1))
    seen = [{token: count for token, count in enumerate(row) if count} for row in counts.tolist()]
    assert seen == [{5: 1}, {5: 1, 7: 1}, {5: 1, 7: 2}]
    assert sampling.history(0).counts.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0], "drafts entered the history"


def test_values_by_hand():
    logits = torch.tensor([[2.0, -2.0, 0.0, 1.0, 1.0, 4.0]])
    own = [TokenHistory([0, 1], [3, 3], vocab_size=6, device=CPU, end_ids=(5, 99))]

    def changed(**options):
        return change_logits(logits, batch(SamplingParams(**options), histories=own), ZERO, NO_PATH)[
            0
        ].tolist()

    assert changed(repetition_penalty=2.0) == [1, -4, 0, 0.5, 1, 4]
    assert changed(presence_penalty=0.5) == [2, -2, 0, 0.5, 1, 4]
    assert changed(frequency_penalty=0.5) == [2, -2, 0, 0, 1, 4]
    assert changed(logit_bias={0: 1, 2: -1}) == [3, -2, -1, 1, 1, 4]
    impossible = float("-inf")
    assert changed(banned_token_ids=(0, 4)) == [impossible, -2, 0, 1, impossible, 4]
    assert (
        changed(allowed_token_ids=[1, 2], banned_token_ids=[1]) == [impossible] * 2 + [0] + [impossible] * 3
    )
    assert changed(min_tokens=3) == [2, -2, 0, 1, 1, impossible]
    assert changed(min_tokens=2) == [2, -2, 0, 1, 1, 4]
    # Bias before penalties: 2 + 1 is divided.
    assert changed(logit_bias={0: 1}, repetition_penalty=2.0)[0] == 1.5
    assert changed(banned_token_ids=(3,), frequency_penalty=-2.0, repetition_penalty=0.5)[3] == impossible


def test_min_tokens_counts_the_path():
    params = SamplingParams(min_tokens=len(OUTPUT) + 2)
    tree = tree_of([(1, 0), (2, 1), (3, 2)])
    rows = TargetProbs(noise(4), tree, batch(params)).rows(torch.arange(4))
    assert (rows[:, list(ENDS)] == 0).all(1).tolist() == [True, True, False, False]


def test_logits_nobody_changes_are_not_copied():
    logits = noise(2)
    plain = batch(
        SamplingParams(top_k=3, temperature=0.5), SamplingParams(temperature=0), histories=[None] * 2
    )
    assert TargetProbs(logits, tree_of([], []), plain).changed_logits is logits
    # Old enough to end: nothing to forbid any more.
    assert change_logits(logits, batch(SamplingParams(min_tokens=len(OUTPUT))), ZERO, NO_PATH) is logits
    before = logits.clone()
    TargetProbs(logits, tree_of([], []), batch(*[SamplingParams(**OPTIONS["all"])] * 2)).rows(torch.arange(2))
    assert torch.equal(logits, before), "the target's logits were changed in place"


def test_rows_without_a_possible_token_are_invalid():
    logits = noise(2)
    logits[:, 1] = float("-inf")
    params = [SamplingParams(allowed_token_ids=(1,)), SamplingParams()]
    p = TargetProbs(logits, tree_of([], []), batch(*params, histories=[None] * 2))
    assert p.invalid.tolist() == [True, False]


def test_nan_is_not_masked_away():
    logits = noise(1)
    logits[0, 5] = float("nan")
    p = TargetProbs(logits, tree_of([]), batch(SamplingParams(banned_token_ids=(5,))))
    assert p.invalid.tolist() == [True]


@pytest.mark.parametrize("options", [{"presence_penalty": 1.0}, {"min_tokens": 3}], ids=str)
def test_a_missing_history_or_path_is_named(options):
    params = SamplingParams(**options)
    with pytest.raises(ValueError, match=r"histories\[0\]=None: .* TokenHistory"):
        warp(noise(1), SamplingBatch([params], CPU), ZERO, NO_PATH)
    with pytest.raises(ValueError, match="paths=None"):
        warp(noise(1), batch(params, histories=[history(output=[1])]), ZERO)


# The history itself


def test_history_counts_and_extends():
    own = TokenHistory([1, 1, 2], [4], vocab_size=6, device=CPU, end_ids={5, 2, 77})
    own.extend([4, 0, 4])
    own.extend([])
    assert own.counts.tolist() == [1, 0, 0, 0, 3, 0]
    assert own.in_prompt.tolist() == [False, True, True, False, False, False]
    assert own.num_output == 4
    assert own.end_ids == (2, 5)


def test_selected_requests_keep_their_history():
    first, second = history([1], [2]), history([3], [4])
    penalty = SamplingParams(presence_penalty=1.0)
    chosen = batch(penalty, penalty, histories=[first, second]).select([1])
    assert chosen.history(0) is second
    assert SamplingBatch([penalty], CPU).select([0]).histories is None
