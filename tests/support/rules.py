"""Verification rules that are wrong on purpose, and a drafter that fails."""

from __future__ import annotations

from dataclasses import replace

from specdec.core import CounterRng, ProposalLaw, TokenTree
from specdec.drafters.base import DrafterContext, DraftModel
from specdec.drafters.models.ngram import NGramModel
from specdec.verifiers.base import ALL_LAWS, Acceptance, TargetProbs, Verifier
from specdec.verifiers.greedy import greedy_walk


class Worst(Verifier):
    """Follows the likeliest path, then adds the least likely token."""

    laws = ALL_LAWS

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        right = greedy_walk(tree, p)
        if tree.max_depth == 0:
            return right
        return replace(right, next_token=p.logits[tree.roots].argmin(-1))


class WorstButLossy(Worst):
    """The same, but it says so."""

    lossy = True


class Renamed(NGramModel):
    """N-gram under a name of its own."""


class Broken(DraftModel):
    """Cannot be built."""

    @classmethod
    def build(cls, context: DrafterContext) -> Broken:
        raise ValueError("broken on purpose")

    def expand(self, frontier: object) -> None: ...


class DrawsOnly(Verifier):
    """Exact for independent draws, which no built-in tree makes."""

    laws = frozenset({ProposalLaw.IID})

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        return greedy_walk(tree, p)
