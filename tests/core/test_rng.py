"""Philox against its published vectors, and the coins' independence."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from specdec.core import CounterRng, Stream
from specdec.core.rng import philox

# Random123, kat_vectors: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


def coins(count: int, seed: int = 0, stream: Stream = Stream.ACCEPT, vary: str = "position") -> torch.Tensor:
    """Coins along one of the things that key them."""
    counter, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    seeds = counter + seed if vary == "seed" else torch.full((count,), seed)
    positions, nodes = (counter if vary == name else zeros for name in ("position", "node"))
    return CounterRng(seeds).uniform(counter, positions, nodes, stream)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, expected):
    assert philox(words(counter), words(key)) == words(expected)


def test_all_vectors_at_once():
    counter, key, expected = (
        tuple(torch.cat(word) for word in zip(*map(words, column), strict=True))
        for column in zip(*VECTORS, strict=True)
    )
    assert all(map(torch.equal, philox(counter, key), expected))


@pytest.mark.parametrize("vary", ["position", "node", "seed"])
def test_coins_are_uniform(vary):
    drawn = coins(200_000, vary=vary)
    assert drawn.dtype == torch.float64
    assert 0 <= drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    cells = (drawn * 100).long().bincount(minlength=100).double()
    statistic = ((cells - 2000) ** 2 / 2000).sum()
    # 99 degrees of freedom: the 1e-5 quantiles.
    assert 48 < statistic < 165


def test_coins_use_all_53_bits():
    scaled = coins(1000) * 2.0**53
    assert torch.equal(scaled, scaled.round())
    assert {int(value) % 2 for value in scaled.tolist()} == {0, 1}


@pytest.mark.parametrize(("a", "b"), list(combinations(Stream, 2)), ids=lambda stream: stream.name.lower())
def test_streams_are_independent(a, b):
    count = 100_000
    correlation = torch.corrcoef(torch.stack((coins(count, stream=a), coins(count, stream=b))))[0, 1]
    assert abs(float(correlation)) < 5 / count**0.5


@pytest.mark.parametrize("vary", ["position", "node", "seed"])
def test_neighbours_are_independent(vary):
    drawn = coins(100_001, vary=vary)
    correlation = torch.corrcoef(torch.stack((drawn[:-1], drawn[1:])))[0, 1]
    assert abs(float(correlation)) < 5 / 100_000**0.5


def test_a_coin_is_a_function_of_its_key():
    seeds = torch.tensor([5, 2**62 + 3, 5])
    rng = CounterRng(seeds)
    requests, positions, nodes = torch.tensor([2, 1, 0]), torch.tensor([7, 7, 7]), torch.tensor([1, 1, 1])
    together = rng.uniform(requests, positions, nodes, Stream.DRAFT)
    alone = CounterRng(seeds[1:2]).uniform(torch.tensor([0]), positions[:1], nodes[:1], Stream.DRAFT)
    assert together[0] == together[2]
    assert together[1] == alone[0]


@pytest.mark.parametrize(
    ("seed", "position", "node"),
    [(2**32, 0, 0), (2**62, 0, 0), (0, 2**32, 0), (0, 1, 0), (0, 0, 1), (0, 0, 99)],
)
def test_every_part_of_the_key_counts(seed, position, node):
    def coin(seed: int, position: int, node: int) -> float:
        rng, zero = CounterRng(torch.tensor([seed])), torch.tensor([0])
        return float(rng.uniform(zero, torch.tensor([position]), torch.tensor([node]), Stream.ACCEPT))

    assert coin(seed, position, node) != coin(0, 0, 0)
