"""The target's own law of the first tokens after a prompt, from plain decoding along given continuations.

Prefixes worth counting are kept, level by level; whatever follows a prefix and is not kept is one cell. So the
cells are a partition of all continuations, whatever the size of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import CounterRng, SamplingParams, TokenTree
from specdec.engine.engine import Engine
from specdec.losslessness.chi_square import ChiSquare, chi_square
from specdec.losslessness.serving import decode, seeded
from specdec.verifiers.base import ALL_LAWS, Acceptance, TargetProbs, Verifier
from specdec.verifiers.walk import acceptance_of

Tokens = tuple[int, ...]
REST = -1
"""In place of a token: any that is not kept after that prefix."""


@dataclass(frozen=True, kw_only=True)
class TargetLaw:
    """Probabilities of the kept prefixes of the first `length` tokens."""

    length: int
    mass: dict[Tokens, float]
    """Probability of each kept prefix; the empty one has 1."""
    rest: dict[Tokens, float]
    """For each prefix that was looked behind: probability that a token follows which is not kept."""

    def cell(self, tokens: Tokens, length: int) -> Tokens:
        """The cell that the first `length` tokens fall into."""
        for end in range(length):
            if tokens[:end] not in self.rest:
                return tokens[:end]
            if tokens[: end + 1] not in self.mass:
                return (*tokens[:end], REST)
        return tokens[:length]

    def cells(self, length: int) -> dict[Tokens, float]:
        """The probability of every cell of the first `length` tokens."""
        leaves = {
            prefix: mass
            for prefix, mass in self.mass.items()
            if len(prefix) == length or (len(prefix) < length and prefix not in self.rest)
        }
        rests = {(*prefix, REST): mass for prefix, mass in self.rest.items() if len(prefix) < length}
        return {**leaves, **rests}

    def count(self, samples: Sequence[Tokens], length: int) -> Counter[Tokens]:
        """How many samples fall into each cell of the first `length` tokens."""
        counts: Counter[Tokens] = Counter()
        for tokens, times in Counter(tokens[:length] for tokens in samples).items():
            counts[self.cell(tokens, length)] += times
        return counts

    def test(self, samples: Sequence[Tokens], length: int) -> ChiSquare:
        """Whether samples follow the law in their first `length` tokens."""
        return chi_square(self.count(samples, length), self.cells(length))


def target_law(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    length: int,
    min_mass: float = 0.002,
    max_prefixes: int = 128,
) -> TargetLaw:
    """Walks the target's conditionals, warped as plain decoding would.

    Args:
        engine: decodes plainly.
        prompt: token ids.
        params: how the tokens are drawn.
        length: tokens of the law.
        min_mass: continuations less probable than this are not kept.
        max_prefixes: continuations looked behind at each level, the likeliest.
    """
    mass: dict[Tokens, float] = {(): 1.0}
    rest: dict[Tokens, float] = {}
    level: list[Tokens] = [()]
    for _ in range(length):
        rows = _conditionals(engine, prompt, params, level)
        following: list[Tokens] = []
        for prefix, row in zip(level, rows, strict=True):
            kept = (row * mass[prefix] >= min_mass).nonzero().squeeze(1)
            rest[prefix] = mass[prefix] * float(row.index_fill(0, kept, 0.0).sum())
            for token, probability in zip(kept.tolist(), row[kept].tolist(), strict=True):
                mass[*prefix, token] = mass[prefix] * probability
                following.append((*prefix, token))
        level = sorted(following, key=mass.__getitem__, reverse=True)[:max_prefixes]
        if not level:
            break
    return TargetLaw(length=length, mass=mass, rest=rest)


def _conditionals(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, prefixes: Sequence[Tokens]
) -> list[Tensor]:
    """`[V]` float64 after each prefix, all of one length: p as plain decoding sees it there."""
    follow = _Follow(prefixes, len(prompt))
    runner = engine.step_runner
    verifier, runner.verifier = runner.verifier, follow
    try:
        own = seeded(params, range(len(prefixes)), max_tokens=len(prefixes[0]) + 1)
        decode(engine, [prompt] * len(prefixes), own)
    finally:
        runner.verifier = verifier
    return follow.rows


class _Follow(Verifier):
    """Takes the tokens it is told, request by seed, and keeps p where they end."""

    laws = ALL_LAWS

    def __init__(self, continuations: Sequence[Tokens], num_prompt_tokens: int) -> None:
        self.continuations = continuations
        self.num_prompt_tokens = num_prompt_tokens
        self.rows: list[Tensor] = [torch.empty(0)] * len(continuations)

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        chosen = []
        ends: list[tuple[int, int]] = []
        for row, (seed, position) in enumerate(
            zip(rng.seeds.tolist(), tree.root_positions.tolist(), strict=True)
        ):
            continuation, done = self.continuations[seed], position + 1 - self.num_prompt_tokens
            chosen.append(0 if done == len(continuation) else continuation[done])
            if done == len(continuation):
                ends.append((seed, row))
        if ends:
            rows = p.rows(tree.roots[[row for _, row in ends]]).double().cpu()
            for (seed, _), row in zip(ends, rows / rows.sum(-1, keepdim=True), strict=True):
                self.rows[seed] = row
        return acceptance_of(tree, tree.roots, torch.tensor(chosen, device=tree.tokens.device))
