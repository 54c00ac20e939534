"""Counter-based randomness: Philox 4x32-10 in integer torch operations, the same bits on every device.

A coin is a pure function of (request seed, absolute position, node, stream). A request's tokens therefore
never depend on its batch mates, on preemption, or on how many coins a neighbour used.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


class Stream(IntEnum):
    """Separate streams: reusing one coin for two purposes biases the output without changing acceptance."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    TARGET = 3


class CounterRng:
    """Coins for the requests of one batch.

    Args:
        seeds: `[B]` int64, one seed a request.
    """

    def __init__(self, seeds: Tensor) -> None:
        self.seeds = seeds

    def uniform(self, requests: Tensor, positions: Tensor, nodes: Tensor, stream: Stream) -> Tensor:
        """Coins in [0, 1) with 53 random bits.

        Args:
            requests: `[n]` int64, row of each coin's request in the batch.
            positions: `[n]` int64, absolute position of the token being decided.
            nodes: `[n]` int64, tree node the coin belongs to; 0 where one coin a position is enough.
            stream: what the coin is for.

        Returns:
            `[n]` float64.
        """
        streams = torch.full_like(positions, int(stream))
        counter = (positions & _MASK, nodes & _MASK, streams, (positions >> 32) & _MASK)
        seeds = self.seeds[requests]
        word_0, word_1, _, _ = philox(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
        return ((word_0 << 21) | (word_1 >> 11)).double() * 2.0**-53


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10. Words are int64 tensors holding unsigned 32-bit values; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIERS[0])
        high_1, low_1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32-bit product, kept below 2**63 by splitting `a` in halves."""
    upper = (a >> 16) * b
    lower = (a & 0xFFFF) * b
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)
