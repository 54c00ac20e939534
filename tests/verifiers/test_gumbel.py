"""The coupled race: right law, and the same tokens whatever was drafted."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from specdec_tests.laws import draft_batch, fixed_tree, outcomes_of, random_table, target_probs
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, make_engine, speculate
from specdec_tests.statistics import chi_square_p_value

from specdec.core import CounterRng, SamplingParams
from specdec.core.sampling import race
from specdec.engine.metrics import SpeculationStats
from specdec.verifiers.gumbel import GumbelVerifier

VOCAB = 5
TARGET = random_table(12, VOCAB)


def tokens_of(tree, seeds, params=None):
    batch = draft_batch([params or SamplingParams()] * len(seeds), CounterRng(torch.tensor(seeds)))
    drafted = fixed_tree(tree)(batch)
    p = target_probs(drafted, TARGET, batch.sampling)
    return [
        outcome.tokens for outcome in outcomes_of(drafted, GumbelVerifier().verify(drafted, p, batch.rng))
    ]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.5, top_k=3)], ids=str)
def test_tokens_do_not_depend_on_the_tree(params):
    seeds = list(range(50))
    plain = tokens_of([], seeds, params)
    chooser = random.Random(0)
    full = [(token, parent) for parent in range(VOCAB + 1) for token in range(VOCAB)]
    trees = [full, [(1, 0), (1, 0), (2, 1)], [(chooser.randrange(VOCAB), n // 2) for n in range(12)]]
    for tree in trees:
        assert [tokens[0] for tokens in tokens_of(tree, seeds, params)] == [tokens[0] for tokens in plain]
    twice = {tokens[:2] for tokens in tokens_of(full, seeds, params)}
    assert len(twice) > 5


def test_law_of_two_tokens():
    full = [(token, parent) for parent in range(VOCAB + 1) for token in range(VOCAB)]
    counts = Counter(tokens[:2] for tokens in tokens_of(full, list(range(20_000))))
    expected = {(a, b): float(TARGET(())[a] * TARGET((a,))[b]) for a in range(VOCAB) for b in range(VOCAB)}
    assert chi_square_p_value(counts, expected) > 1e-4


def test_race_is_a_draw():
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 6.0])
    count = 40_000
    zeros = torch.zeros(count, dtype=torch.int64)
    coins = CounterRng(torch.tensor([3])).race(zeros, torch.arange(count), 5)
    counts = Counter(race(weights.expand(count, -1), coins).tolist())
    assert chi_square_p_value(counts, {1: 0.3, 2: 0.1, 4: 0.6}) > 1e-4


def test_coupled_races_agree_as_often_as_promised():
    """P(same winner) >= (1 - TV) / (1 + TV); arXiv:2408.07978, theorem 1."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    count = 40_000
    coins = CounterRng(torch.tensor([4])).race(torch.zeros(count, dtype=torch.int64), torch.arange(count), 3)
    same = (race(p.expand(count, -1), coins) == race(q.expand(count, -1), coins)).double().mean()
    assert float(same) > (1 - 0.3) / (1 + 0.3) - 0.01


def test_coins_of_a_race_are_distinct_and_do_not_depend_on_the_vocabulary():
    rng = CounterRng(torch.tensor([1, 2]))
    rows, positions = torch.tensor([0, 0, 1]), torch.tensor([5, 6, 5])
    coins = rng.race(rows, positions, 1001)
    assert coins.shape == (3, 1001)
    assert torch.equal(coins[:, :10], rng.race(rows, positions, 10))
    assert coins.unique().numel() == coins.numel()
    assert float(coins.min()) > 0
    assert float(coins.max()) < 1
    assert torch.equal(
        coins[2:], CounterRng(torch.tensor([2])).race(torch.tensor([0]), torch.tensor([5]), 1001)
    )


def test_engine_output_is_the_same_whatever_the_drafter():
    """And a chain that races with the target's coins is accepted more often than the likeliest tokens."""
    lm, draft = tiny_lm(seed=3), tiny_lm(seed=3, scale=2.7)
    params = SamplingParams(temperature=1.0, max_tokens=30)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]] * 4

    def run(config):
        return complete(make_engine(lm.target, config, num_blocks=512), prompts, params)

    plain = run(speculate("none", verifier="gumbel"))
    accepted = {}
    for tree, args in (
        ("chain", {"num_tokens": 4}),
        ("chain", {"num_tokens": 4, "coupled": True}),
        ("expansion", {}),
        ("dyspec", {"num_nodes": 6}),
    ):
        requests = run(
            speculate("small_lm", tree, "gumbel", drafter_args={"model": draft.target}, tree_args=args)
        )
        assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in plain]
        stats = SpeculationStats.merge([request.stats for request in requests])
        accepted[tree, bool(args.get("coupled"))] = stats.acceptance_rate
    assert accepted["chain", True] > accepted["chain", False] + 0.05
