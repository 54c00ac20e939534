"""What the rules share: greedy paths, batch mates, and numbers at their edges."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from specdec_tests.laws import (
    LAST_COIN,
    ROOT_POSITION,
    Conditional,
    ConstantCoin,
    Outcome,
    constant,
    draft_batch,
    fixed_tree,
    node_paths,
    outcomes_of,
    random_table,
    target_probs,
    warped,
)

from specdec.core import CounterRng, ProposalLaw, SamplingBatch, SamplingParams, TokenTree
from specdec.verifiers.base import Verifier
from specdec.verifiers.registry import VERIFIERS
from specdec.verifiers.target_only import TargetOnlyVerifier
from specdec.verifiers.token_rejection import TokenRejectionVerifier
from specdec.verifiers.walk import acceptance_of, find_child

VOCAB = 5
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5, top_k=3),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.4, top_p=0.7),
]
Entries = Sequence[tuple[int, int]]


def random_entries(seed: int) -> list[tuple[int, int]]:
    """Up to 20 nodes over 5 tokens: siblings repeat, depths vary, the order is not breadth-first."""
    chooser = random.Random(seed)
    return [
        (chooser.randrange(VOCAB), chooser.randrange(node)) for node in range(1, chooser.randrange(1, 21))
    ]


def verify(
    verifier: Verifier,
    trees: Sequence[Entries],
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    target: Conditional,
) -> list[Outcome]:
    count = len(trees)
    roots, positions = torch.zeros(count, dtype=torch.int64), torch.full((count,), ROOT_POSITION)
    tree = TokenTree.from_lists(roots, trees, positions)
    p = target_probs(tree, target, SamplingBatch(params, torch.device("cpu")))
    return outcomes_of(tree, verifier.verify(tree, p, CounterRng(torch.tensor(seeds))))


GREEDY = [name for name in VERIFIERS.names() if not VERIFIERS.get(name).lossy]
MIXED = [
    name
    for name in GREEDY
    if ProposalLaw.DETERMINISTIC in VERIFIERS.get(name).laws and not VERIFIERS.get(name).greedy_only
]


def greedy_continuation(target: Conditional, length: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while len(path) < length:
        path += (int(target(path).argmax()),)
    return path


@pytest.mark.parametrize(
    ("name", "mixed"), [(name, False) for name in GREEDY] + [(name, True) for name in MIXED]
)
def test_greedy_keeps_the_longest_argmax_path(name, mixed):
    target = random_table(8, VOCAB)
    for seed in range(40):
        truth = greedy_continuation(target, 21)
        chooser = random.Random(seed)
        # The right path, cut somewhere, its nodes strewn among wrong ones.
        entries: list[tuple[int, int]] = []
        last, depth = 0, 0
        for _ in range(chooser.randrange(1, 15)):
            if chooser.random() < 0.4:
                entries.append((truth[depth], last))
                last, depth = len(entries), depth + 1
            else:
                wrong = chooser.choice([token for token in range(VOCAB) if token != truth[depth]])
                entries.append((wrong, last))
        params = [SamplingParams(temperature=0), SamplingParams(temperature=float(mixed))]
        (outcome, _) = verify(VERIFIERS.create(name), [entries, [(0, 0)]], params, [seed, seed], target)
        assert outcome.tokens == truth[: depth + 1]


@pytest.mark.parametrize("name", MIXED)
def test_batch_mates_change_nothing(name):
    target = random_table(9, VOCAB)
    for seed in range(30):
        trees = [random_entries(500 + 10 * seed + row) for row in range(5)]
        params = [SamplingParams(temperature=0.5 + row / 4, top_k=row) for row in range(5)]
        seeds = [seed * 7 + row for row in range(5)]
        together = verify(VERIFIERS.create(name), trees, params, seeds, target)
        order = random.Random(seed).sample(range(5), 5)
        shuffled = verify(
            VERIFIERS.create(name),
            *([values[row] for row in order] for values in (trees, params, seeds)),
            target,
        )
        for row in range(5):
            (alone,) = verify(VERIFIERS.create(name), [trees[row]], [params[row]], [seeds[row]], target)
            assert together[row] == alone == shuffled[order.index(row)]


def test_target_only_tokens_do_not_depend_on_the_tree():
    target = random_table(10, VOCAB)
    for seed in range(40):
        (plain,) = verify(TargetOnlyVerifier(), [[]], [SamplingParams()], [seed], target)
        full = [(token, 0) for token in range(VOCAB)]
        for entries in (random_entries(seed), full):
            (outcome,) = verify(TargetOnlyVerifier(), [entries], [SamplingParams()], [seed], target)
            assert outcome.tokens[0] == plain.tokens[0]


# Numbers at their edges


def one_level(p: Conditional, q: Sequence[float], tokens: Sequence[int], coin: float) -> Outcome:
    """Token rejection of a node drawn from q (or given, without q) under one coin for everything."""
    rng = ConstantCoin(coin)
    batch = draft_batch([SamplingParams()], rng)
    fields = {}
    if q:
        q_row = torch.tensor([0] + [-1] * len(tokens))
        fields = {"law": ProposalLaw.CHAIN, "q": torch.tensor([q]), "q_row": q_row}
    tree = fixed_tree([(token, 0) for token in tokens], **fields)(batch)
    (outcome,) = outcomes_of(
        tree, TokenRejectionVerifier().verify(tree, target_probs(tree, p, batch.sampling), rng)
    )
    return outcome


COINS = [0.0, 2.0**-53, 0.25, 0.5, 0.999999, LAST_COIN]


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((0.4, 0.3, 0.2, 0.1), (0.4, 0.3, 0.2, 0.1)),
        ((0.25, 0.25, 0.25, 0.25), (0.25, 0.25, 0.25, 0.25)),
        ((1 / 3, 1 / 3, 1 / 3, 0.0), (1 / 3, 1 / 3, 1 / 3, 0.0)),
        ((1.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)),
    ],
    ids=["different", "uniform", "thirds", "one-hot"],
)
def test_equal_distributions_always_accept(p, q, coin):
    for token in (token for token, probability in enumerate(p) if probability):
        # q as a drafter reports it: after the same warping.
        reported = warped(constant(*q), (), SamplingParams()).tolist()
        assert one_level(constant(*p), reported, [token], coin).path == (1,)


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("shift", [1e-8, -1e-8, 1e-7, -1e-7])
def test_nearly_equal_distributions_stay_finite(shift, coin):
    p = (0.25 + shift, 0.25 - shift, 0.25, 0.25)
    for token in range(4):
        outcome = one_level(constant(*p), [0.25] * 4, [token], coin)
        assert 0 <= outcome.tokens[0] < 4
        assert coin > 0.99 or outcome.path == (1,)


@pytest.mark.parametrize("coin", COINS)
def test_impossible_tokens_are_never_kept(coin):
    p = constant(0.0, 0.5, 0.0, 0.5)
    for q in ((), (0.7, 0.1, 0.1, 0.1), (0.0, 0.2, 0.8, 0.0), (1.0, 0.0, 0.0, 0.0)):
        for tokens in ([0], [2], [0, 2], [0, 0]):
            if q and len(tokens) > 1:
                continue
            outcome = one_level(p, q, tokens, coin)
            assert outcome.path == ()
            assert outcome.tokens[0] in (1, 3)


@pytest.mark.parametrize("coin", COINS)
def test_children_that_cover_the_target_are_accepted(coin):
    """Nothing is left to draw after them, whatever the rounding."""
    outcome = one_level(constant(0.1, 0.2, 0.7, 0.0), (), [0, 1, 2], coin)
    assert outcome.tokens[0] in (0, 1, 2)
    assert len(outcome.path) == 1


# What rules share


def test_acceptance_of_gathers_the_path():
    tree = TokenTree.from_lists(
        torch.tensor([0, 0, 0]),
        [[(1, 0), (2, 0), (3, 2), (4, 1), (5, 3)], [], [(6, 0)]],
        torch.tensor([5, 6, 7]),
    )
    last = torch.tensor([5, 6, 7])
    acceptance = acceptance_of(tree, last, torch.tensor([9, 9, 9]))
    assert acceptance.path.tolist() == [[2, 3, 5], [-1, -1, -1], [-1, -1, -1]]
    assert acceptance.num_accepted.tolist() == [3, 0, 0]
    assert tree.tokens[acceptance.path[0]].tolist() == [2, 3, 5]


def test_find_child_takes_the_first_of_duplicates():
    tree = TokenTree.from_lists(
        torch.tensor([0, 0]), [[(1, 0), (2, 0), (1, 0), (1, 2)], [(1, 0)]], torch.tensor([0, 0])
    )
    assert find_child(tree, torch.tensor([0, 5]), torch.tensor([1, 2])).tolist() == [1, -1]
    assert find_child(tree, torch.tensor([2, 5]), torch.tensor([1, 1])).tolist() == [4, 6]
    assert find_child(tree, torch.tensor([4, 6]), torch.tensor([1, 1])).tolist() == [-1, -1]


def test_probabilities_agree_with_node_paths():
    tree = TokenTree.from_lists(torch.tensor([0]), [[(1, 0), (2, 1)]], torch.tensor([4]))
    target = random_table(11, VOCAB)
    p = target_probs(tree, target, SamplingBatch([SamplingParams()], torch.device("cpu")))
    assert node_paths(tree) == [[(), (1,), (1, 2)]]
    torch.testing.assert_close(p.rows(torch.tensor([2, 0])), torch.stack((target((1, 2)), target(()))))


@pytest.mark.parametrize(
    "row", [[float("nan"), 0, 0], [float("-inf")] * 3, [0, float("inf"), 0], [0, 1, float("nan")]], ids=str
)
def test_rows_nothing_can_be_drawn_from_are_invalid(row):
    tree = TokenTree.root_only(torch.tensor([0, 0]), torch.tensor([0, 0]))
    logits = torch.tensor([row, [0.0, float("-inf"), 1.0]])
    p = target_probs(tree, random_table(0, 3), SamplingBatch([SamplingParams()] * 2, torch.device("cpu")))
    assert type(p)(logits, tree, p.sampling).invalid.tolist() == [True, False]
