"""C30: the edges of n-gram drafting. Rule: longest suffix first; among its occurrences the latest wins."""

from __future__ import annotations

import pytest
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, make_engine, speculate

from specdec.core import SamplingParams
from specdec.drafters.models.ngram import _SuffixIndex


def draft(tokens: list[int], k: int = 4, max_n: int = 3, min_n: int = 1) -> list[int]:
    """The chain of best continuations."""
    index = _SuffixIndex(max_n, min_n)
    index.extend(tokens)
    path: list[int] = []
    while len(path) < k and (candidates := index.continuations(path)):
        path.append(candidates[0][0])
    return path


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7], []),
        ([1, 2, 3], []),
        ([7, 7, 7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2, 8]),
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        # The longer suffix [5, 1] decides against the later occurrence of [1] alone.
        ([5, 1, 6, 2, 1, 7, 5, 1], [6, 2, 1, 7]),
    ],
    ids=["one", "no-match", "repeated", "latest", "overlap", "longest-suffix"],
)
def test_chain(tokens: list[int], expected: list[int]) -> None:
    assert draft(tokens) == expected


def test_min_n_refuses_shorter_matches() -> None:
    assert draft([1, 5, 1], min_n=1) == [5, 1, 5, 1]
    assert draft([1, 5, 1], min_n=2) == []


@pytest.mark.parametrize(
    "prompt",
    [[7], [7] * 5, [1, 2, 3], [1, 2, 9, 1, 2, 8, 1, 2], [1, 2, 60, 5, 1, 2], list(range(40)) * 2],
    ids=["one", "repeated", "no-match", "two-matches", "eos-in-prompt", "long"],
)
@pytest.mark.parametrize("tree", ["chain", "best_first", "static"])
def test_output_is_plain_decodings(prompt: list[int], tree: str) -> None:
    lm = tiny_lm(eos=(60,))
    (request,) = complete(
        make_engine(lm.target, speculate("ngram", tree)),
        [prompt],
        SamplingParams(temperature=0, max_tokens=30),
    )
    plain = lm.greedy(prompt, 30)
    end = plain.index(60) + 1 if 60 in plain else 30
    assert request.output_token_ids == plain[:end]


def test_no_match_is_a_plain_step_with_nothing_drafted() -> None:
    engine = make_engine(tiny_lm().target, speculate("ngram", drafter_args={"min_n": 4, "max_n": 4}))
    (request,) = complete(engine, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3))
    assert request.stats.num_drafted == 0
    assert request.stats.acceptance_rate is None
    assert request.stats.acceptance_length == 1.0


def test_empty_prompt_is_refused() -> None:
    engine = make_engine(tiny_lm().target, speculate("ngram"))
    with pytest.raises(ValueError, match="prompt_token_ids is empty"):
        engine.add_request([])
