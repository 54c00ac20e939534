"""C06: the q of the acceptance test is the distribution the draft token was drawn from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from specdec_tests.laws import (
    Game,
    constant,
    decode_law,
    exact_law,
    fixed_tree,
    grow,
    joint_law,
)
from specdec_tests.statistics import total_variation

from specdec.core import SamplingParams, TokenTree
from specdec.drafters.base import DraftBatch
from specdec.drafters.trees.chain import ChainProposer
from specdec.verifiers.registry import VERIFIERS

TARGET = constant(0.25, 0.25, 0.25, 0.25)
Q = constant(0.4, 0.3, 0.2, 0.1)
WARP = SamplingParams(temperature=0.7, top_k=2, top_p=0.9)
DRAFTS = {
    "argmax": grow(ChainProposer(1), Q),
    "sampled": grow(ChainProposer(1, sample=True), Q),
    "n-gram": fixed_tree([(3, 0), (1, 1)]),
}


def first_token(game: Game) -> list[float]:
    law = joint_law(exact_law(game), game.warped, 1)
    return [law.get((token,), 0.0) for token in range(4)]


def without_warp(propose, target=None):
    """Drafts as if the request had no warping."""

    def plain(batch: DraftBatch) -> TokenTree:
        params = [SamplingParams()] * batch.size
        return propose(replace(batch, sampling=replace(batch.sampling, params=params)))

    return plain


@pytest.mark.parametrize("verifier", ["token", "target_only"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_uniform_target(draft, verifier):
    game = Game(target=TARGET, verifier=VERIFIERS.create(verifier), propose=DRAFTS[draft])
    assert first_token(game) == pytest.approx([0.25] * 4, abs=1e-6)


@pytest.mark.parametrize(
    "params", [WARP, SamplingParams(temperature=0.7), SamplingParams(top_p=0.55)], ids=str
)
@pytest.mark.parametrize("sides", ["both", "target-only"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_warped_target(draft, sides, params):
    target = constant(0.3, 0.35, 0.15, 0.2)
    propose = DRAFTS[draft] if sides == "both" else without_warp(DRAFTS[draft])
    game = Game(target=target, verifier=VERIFIERS.create("token"), propose=propose, params=params)
    law = joint_law(exact_law(game), game.warped, 2)
    assert total_variation(law, decode_law(game.warped, 2)) < 1e-6


def test_the_bug_gives_its_known_bias():
    def lie(batch: DraftBatch) -> TokenTree:
        return replace(DRAFTS["sampled"](batch), tokens=DRAFTS["argmax"](batch).tokens)

    game = Game(target=TARGET, verifier=VERIFIERS.create("token"), propose=lie)
    assert first_token(game) == pytest.approx([0.625, 0, 0.09375, 0.28125], abs=1e-6)
