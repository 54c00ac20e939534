"""A budget shared by the requests of a batch: the best nodes of all, at least one of each."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from specdec_tests.laws import node_paths
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, make_engine, speculate
from specdec_tests.trees import CHOSEN, PROPOSERS, TABLES, CountingModel, batch_of

from specdec.core import ProposalLaw, SamplingParams, TokenTree
from specdec.drafters.base import DraftBatch, Drafter
from specdec.drafters.budget import BudgetedDrafter, best_nodes, prune
from specdec.drafters.model_drafter import ModelDrafter

LM = tiny_lm()


class Fixed(Drafter):
    """Proposes trees given as lists."""

    law = ProposalLaw.DETERMINISTIC
    max_nodes = 9

    def __init__(self, trees: list[list[tuple[int, int]]], scores: list[float]) -> None:
        self.trees = trees
        self.scores = scores

    def propose(self, batch: DraftBatch, budget: list[int]) -> TokenTree:
        return TokenTree.from_lists(
            batch.roots, self.trees, batch.root_positions, self.law, score=torch.tensor(self.scores)
        )


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9, 20, 99])
@pytest.mark.parametrize("name", CHOSEN)
def test_kept_nodes_are_the_best_of_the_batch(name, limit):
    for seed in range(4):
        chooser = random.Random(seed)
        budgets = [chooser.choice([0, 2, 5, 10]) for _ in range(4)]
        inner = ModelDrafter(CountingModel(seed), PROPOSERS[name])
        batch = batch_of(4, [chooser.randrange(1, 5) for _ in range(4)])
        whole = inner.propose(batch, budgets)
        tree = BudgetedDrafter(ModelDrafter(CountingModel(seed), PROPOSERS[name]), limit).propose(
            batch, budgets
        )
        tree.validate()
        drafting = sum(count > 0 for count in whole.num_drafted)
        assert sum(tree.num_drafted) == min(sum(whole.num_drafted), max(limit, drafting))
        assert [count > 0 for count in tree.num_drafted] == [count > 0 for count in whole.num_drafted]
        kept = [float(s) for s, d in zip(tree.score, tree.depth, strict=True) if d]
        every = [float(s) for s, d in zip(whole.score, whole.depth, strict=True) if d]
        if limit >= sum(count > 0 for count in whole.num_drafted) and limit < len(every):
            floor = [max(every_of(whole, row)) for row in range(4) if whole.num_drafted[row]]
            rest = sorted(every, reverse=True)
            for score in floor:
                rest.remove(score)
            assert sorted(kept, reverse=True) == sorted(floor + rest[: limit - len(floor)], reverse=True)
        for row, (own, all_own) in enumerate(zip(node_paths(tree), node_paths(whole), strict=True)):
            assert own == [path for path in all_own if path in set(own)], f"request {row}: order or closure"


def every_of(tree: TokenTree, row: int) -> list[float]:
    start, end = tree.host_offsets[row], tree.host_offsets[row + 1]
    return tree.score[start + 1 : end].tolist()


def test_ties_go_to_shallow_nodes_then_to_early_requests():
    drafter = Fixed([[(1, 0), (2, 1), (3, 2)], [(4, 0), (5, 0)]], scores=[0.0] * 7)
    batch = batch_of(2)
    expected = {2: [1, 1], 3: [1, 2], 4: [2, 2], 5: [3, 2]}
    for limit, counts in expected.items():
        tree = BudgetedDrafter(drafter, limit).propose(batch, [9, 9])
        assert tree.num_drafted == counts
        tree.validate()


def test_one_node_each_comes_before_the_budget():
    drafter = Fixed([[(1, 0), (2, 0)], [], [(4, 0)], [(5, 0), (6, 1)]], [0, -1, -2, 0, 0, -9, 0, -8, -8.5])
    tree = BudgetedDrafter(drafter, 1).propose(batch_of(4), [9] * 4)
    assert tree.num_drafted == [1, 0, 1, 1]
    assert tree.tokens.tolist() == [0, 1, 0, 0, 4, 0, 5]


def test_pruned_trees_keep_their_fields():
    inner = ModelDrafter(CountingModel(TABLES["flat"]), PROPOSERS["best-first"])
    whole = inner.propose(batch_of(2), [9, 9])
    keep = best_nodes(whole, 7)
    tree = prune(whole, keep)
    for name in ("tokens", "depth", "score", "draft_slots"):
        assert torch.equal(getattr(tree, name), getattr(whole, name)[keep])
    assert torch.equal(tree.positions, whole.positions[keep])
    assert torch.equal(
        tree.tokens[tree.flat_parents.clamp(min=0)], whole.tokens[whole.flat_parents.clamp(min=0)][keep]
    )


def test_the_engine_shares_the_budget():
    """The output is plain decoding's, no step drafts more, and a request alone gets its whole tree."""
    config = speculate("self", "best_first", tree_args={"num_nodes": 8}, max_batch_nodes=10)
    engine = make_engine(LM.target, config)
    drafted: dict[int, set[int]] = {}
    engine.observers.append(
        lambda result, kept: drafted.setdefault(len(result.requests), set()).add(sum(result.tree.num_drafted))
    )
    prompts = [[row, 3, row] for row in range(1, 5)]
    params = [SamplingParams(temperature=0, max_tokens=8 + 12 * row) for row in range(4)]
    for prompt, own, request in zip(prompts, params, complete(engine, prompts, params), strict=True):
        assert request.output_token_ids == LM.greedy(prompt, own.max_tokens)
    assert max(itertools.chain(*drafted.values())) == 10
    assert max(drafted[1]) == 8


@pytest.mark.parametrize("limit", [0, -1, 2.5, True])
def test_budgets_that_are_none(limit):
    with pytest.raises(ValueError, match=f"max_batch_nodes={limit}: expected max_batch_nodes"):
        speculate("ngram", max_batch_nodes=limit)
