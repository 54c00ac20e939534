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
    """Separate streams: reusing one coin for two purposes biases the output without changing acceptance.

    DRAFT and ACCEPT coins belong to a node of a step: their key is the position of the step's root and the node's
    index in its tree. The others belong to a position of the output, whatever the step: their node is 0.
    """

    DRAFT = 0
    """Drawing a node's token."""
    ACCEPT = 1
    """Accepting a node."""
    RESIDUAL = 2
    """Drawing the correction after a rejection."""
    TARGET = 3
    """Drawing a token from the target's own distribution."""
    RACE = 4
    """One coin a token of the vocabulary, for coupled draws."""


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
            positions: `[n]` int64, position of the step's root, or of the token being decided: see `Stream`.
            nodes: `[n]` int64, index of a node in its tree; 0 where the coin belongs to a position.
            stream: what the coin is for.

        Returns:
            `[n]` float64.
        """
        word_0, word_1, _, _ = self._words(requests, positions, nodes, stream)
        return ((word_0 << 21) | (word_1 >> 11)).double() * 2.0**-53

    def race(self, requests: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        """One coin in (0, 1) with 32 random bits for each token that could follow at a position.

        Args:
            requests: `[n]` int64, row of each request in the batch.
            positions: `[n]` int64, position of the token being decided.
            vocab_size: V.

        Returns:
            `[n, V]` float64; a token's coin does not depend on V.
        """
        blocks = torch.arange(-(-vocab_size // 4), device=positions.device)  # [V / 4]
        words = self._words(requests.unsqueeze(1), positions.unsqueeze(1), blocks.unsqueeze(0), Stream.RACE)
        coins = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]  # [n, V]
        return (coins.double() + 0.5) * 2.0**-32

    def _words(
        self, requests: Tensor, positions: Tensor, nodes: Tensor, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        streams = torch.full_like(positions, int(stream))
        counter = (positions & _MASK, nodes & _MASK, streams, (positions >> 32) & _MASK)
        seeds = self.seeds[requests]
        return philox(counter, (seeds & _MASK, (seeds >> 32) & _MASK))


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10. Words are int64 tensors holding unsigned 32-bit values; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products wrap around 2**64 and shifts keep the sign; the mask takes the right 32 bits of either.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) ^ c1 ^ k0) & _MASK, second & _MASK
        c2, c3 = ((first >> 32) ^ c3 ^ k1) & _MASK, first & _MASK
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0, c1, c2, c3
