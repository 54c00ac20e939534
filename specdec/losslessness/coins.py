"""The coins of a run: which were asked for, whether one served twice, whether streams are independent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from specdec.core import CounterRng, Stream
from specdec.engine.engine import Engine
from specdec.losslessness.chi_square import ChiSquare, chi_square

_BINS = 4


@dataclass(kw_only=True, eq=False)
class CoinLog:
    """Every coin that a run asked for, races excepted: their coins are shared by design."""

    keys: list[Tensor] = field(default_factory=list)
    """`[n, 4]` int64 each: seed, position, node, stream."""
    values: list[Tensor] = field(default_factory=list)
    """`[n]` float64 each."""
    steps: list[Tensor] = field(default_factory=list)
    """`[n]` int64 each, number of the step that asked."""
    num_steps: int = 0

    @property
    def num_coins(self) -> int:
        return sum(len(values) for values in self.values)

    def repeated(self, streams: frozenset[Stream]) -> list[tuple[int, int, int, Stream]]:
        """Keys (seed, position, node, stream) of these streams that were asked for more than once."""
        if not self.keys:
            return []
        keys, counts = torch.cat(self.keys).unique(dim=0, return_counts=True)
        rows = keys[counts > 1].tolist()
        return [(*key, Stream(stream)) for *key, stream in rows if Stream(stream) in streams]

    def colliding(self) -> int:
        """Coins of different keys that have the same 53 bits: by chance practically none."""
        if not self.keys:
            return 0
        keys, index = torch.cat(self.keys).unique(dim=0, return_inverse=True)
        values = torch.empty(len(keys), dtype=torch.float64).scatter_(0, index, torch.cat(self.values))
        return len(keys) - len(values.unique())

    def dependence(self) -> dict[tuple[Stream, Stream], ChiSquare]:
        """For each two streams, a test that their first coins in a request's step are independent and uniform."""
        first = self._first_coins()
        tests = {}
        for one, other in combinations(first, 2):
            shared = first[one].keys() & first[other].keys()
            counts = Counter(
                (int(first[one][step] * _BINS), int(first[other][step] * _BINS)) for step in shared
            )
            if len(shared) >= 5 * _BINS**2:
                cells = {(a, b): _BINS**-2 for a in range(_BINS) for b in range(_BINS)}
                tests[one, other] = chi_square(counts, cells)
        return tests

    def _first_coins(self) -> dict[Stream, dict[tuple[int, int], float]]:
        first: dict[Stream, dict[tuple[int, int], float]] = {}
        for keys, values, steps in zip(self.keys, self.values, self.steps, strict=True):
            for (seed, _, _, stream), value, step in zip(
                keys.tolist(), values.tolist(), steps.tolist(), strict=True
            ):
                first.setdefault(Stream(stream), {}).setdefault((step, seed), value)
        return first


class RecordingRng(CounterRng):
    """A `CounterRng`, or another generator, that notes what is asked for."""

    def __init__(self, inner: CounterRng, log: CoinLog) -> None:
        super().__init__(inner.seeds)
        self.inner = inner
        self.log = log
        log.num_steps += 1

    def uniform(self, requests: Tensor, positions: Tensor, nodes: Tensor, stream: Stream) -> Tensor:
        coins = self.inner.uniform(requests, positions, nodes, stream)
        streams = torch.full_like(positions, int(stream))
        key = torch.stack((self.seeds[requests], positions, nodes.expand_as(positions), streams), dim=-1)
        self.log.keys.append(key.cpu())
        self.log.values.append(coins.cpu())
        self.log.steps.append(torch.full((len(coins),), self.log.num_steps))
        return coins

    def race(self, requests: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        return self.inner.race(requests, positions, vocab_size)


@contextmanager
def recorded(engine: Engine) -> Iterator[CoinLog]:
    """Notes the coins of all steps of an engine."""
    log, runner = CoinLog(), engine.step_runner
    make: Callable[[Tensor], CounterRng] = runner.make_rng
    runner.make_rng = lambda seeds: RecordingRng(make(seeds), log)
    try:
        yield log
    finally:
        runner.make_rng = make
