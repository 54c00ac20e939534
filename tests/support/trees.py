"""Every tree proposer in a small version, and draft models given as tables that note what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from specdec_tests.laws import Conditional, TableModel, draft_batch, random_table
from torch import Tensor

from specdec.core import CounterRng, SamplingBatch, SamplingParams, TokenHistory
from specdec.drafters.base import DraftBatch, DraftModel, DraftOutput, TreeProposer
from specdec.drafters.trees.best_first import BestFirstProposer
from specdec.drafters.trees.builder import Frontier
from specdec.drafters.trees.chain import ChainProposer
from specdec.drafters.trees.ddtree import DDTreeProposer
from specdec.drafters.trees.dyspec import DySpecProposer
from specdec.drafters.trees.eagle2 import Eagle2Proposer
from specdec.drafters.trees.expansion import ExpansionProposer
from specdec.drafters.trees.opt_tree import OptTreeProposer
from specdec.drafters.trees.sequoia import SequoiaProposer
from specdec.drafters.trees.static import StaticProposer

VOCAB = 6
_STATIC = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]

PROPOSERS: dict[str, TreeProposer] = {
    "chain": ChainProposer(5),
    "chain-confident": ChainProposer(5, min_confidence=0.4),
    "chain-drawn": ChainProposer(5, sample=True),
    "chain-drawn-confident": ChainProposer(5, sample=True, min_confidence=0.4),
    "static": StaticProposer(),
    "static-gaps": StaticProposer([(0,), (3,), (3, 1)]),
    "static-iid": StaticProposer(_STATIC, draw="with_replacement"),
    "static-wor": StaticProposer(_STATIC, draw="without_replacement"),
    "medusa": StaticProposer("medusa"),
    "eagle1": StaticProposer("eagle1"),
    "expansion": ExpansionProposer([2, 1, 2]),
    "expansion-iid": ExpansionProposer([2, 3], draw="with_replacement"),
    "expansion-wor": ExpansionProposer([3, 2], draw="without_replacement"),
    "best-first": BestFirstProposer(num_nodes=10, max_depth=4, branching=3),
    "eagle2": Eagle2Proposer(num_nodes=10, depth=4, top_k=3),
    "opt-tree": OptTreeProposer(num_nodes=10, max_depth=4, delta=0.01),
    "dyspec": DySpecProposer(num_nodes=9, max_depth=4),
    "sequoia": SequoiaProposer([0.6, 0.2, 0.1], num_nodes=9, max_depth=4),
    "ddtree": DDTreeProposer(num_nodes=9, max_depth=4),
}
DRAWN = [name for name, proposer in PROPOSERS.items() if proposer.law.needs_q]
CHOSEN = [name for name in PROPOSERS if name not in DRAWN]


class CountingModel(TableModel):
    """Notes the path of every node it expands, and the logits it gave; its marginals ignore the path."""

    provides = frozenset(DraftOutput)

    def __init__(self, conditional: Conditional | int) -> None:
        if isinstance(conditional, int):
            conditional = random_table(conditional, VOCAB, sharpness=2.0)
        super().__init__(conditional)
        self.expanded: list[tuple[int, tuple[int, ...]]] = []
        self.answers: list[tuple[Frontier, Tensor]] = []

    def expand(self, frontier: Frontier) -> Tensor:
        assert frontier.rows == sorted(frontier.rows), "nodes of one request are adjacent"
        self.expanded += [
            (row, tuple(path)) for row, path in zip(frontier.rows, frontier.paths(), strict=True)
        ]
        logits = super().expand(frontier)
        self.answers.append((frontier, logits))
        return logits

    def marginals(self, batch: DraftBatch, depth: int) -> Tensor:
        return torch.stack([self.level(level) for level in range(depth)]).log().expand(batch.size, -1, -1)

    def level(self, level: int) -> Tensor:
        """The marginal at a depth, 0 for the root's children."""
        return self.conditional((0,) * level)

    def log_q(self, path: Sequence[int], needs: DraftOutput = DraftOutput.CONDITIONALS) -> float:
        """Log probability of a path, conditional by conditional or by marginals."""
        marginal = needs is DraftOutput.MARGINALS
        rows = [self.level(i) if marginal else self.conditional(tuple(path[:i])) for i in range(len(path))]
        return sum(float(row[token].log()) for row, token in zip(rows, path, strict=True))


class Speechless(DraftModel):
    """Knows no continuation of paths of some length."""

    provides = frozenset(DraftOutput)

    def __init__(self, model: DraftModel, longest: int) -> None:
        self.model = model
        self.longest = longest

    def expand(self, frontier: Frontier) -> Tensor:
        return self.model.expand(frontier)

    def top_k(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        tokens, log_q = self.model.top_k(frontier, k)
        knows = torch.tensor([len(path) < self.longest for path in frontier.paths()])
        return tokens, log_q.masked_fill(~knows.unsqueeze(1), float("-inf"))

    def marginals(self, batch: DraftBatch, depth: int) -> Tensor:
        logits = self.model.marginals(batch, depth).clone()
        logits[:, self.longest :] = float("-inf")
        return logits


def _ties(path: tuple[int, ...]) -> Tensor:
    return torch.full((VOCAB,), 1 / VOCAB)


def _certain(path: tuple[int, ...]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(sum(path) % VOCAB), VOCAB).float()


def _sparse(path: tuple[int, ...]) -> Tensor:
    row = random_table(31, VOCAB)(path).clone()
    row[torch.arange(VOCAB) % 3 != len(path) % 3] = 0
    return row / row.sum()


def _broken(path: tuple[int, ...]) -> Tensor:
    """NaN after some paths."""
    row = random_table(32, VOCAB)(path)
    return row * float("nan") if path and path[-1] % 2 else row


TABLES: dict[str, Conditional] = {
    "peaked": random_table(30, VOCAB, sharpness=4.0),
    "flat": random_table(33, VOCAB, sharpness=0.3),
    "ties": _ties,
    "certain": _certain,
    "sparse": _sparse,
    "broken": _broken,
}


def batch_of(
    count: int,
    max_depths: Sequence[int] | None = None,
    params: SamplingParams | None = None,
    seeds: Sequence[int] | None = None,
) -> DraftBatch:
    """Requests of the same parameters, with a history of their four zeros."""
    rng = CounterRng(torch.tensor(list(seeds or range(count))))
    one = params or SamplingParams()
    batch = draft_batch([one] * count, rng)
    device = torch.device("cpu")
    history = TokenHistory([0], [0, 0, 0], vocab_size=VOCAB, device=device)
    batch = replace(batch, sampling=SamplingBatch([one] * count, device, [history] * count))
    return replace(batch, max_depths=list(max_depths)) if max_depths else batch


def best_paths(
    score: Callable[[tuple[int, ...]], float], max_depth: int, branching: int
) -> list[tuple[int, ...]]:
    """All paths of the `branching` best-scored children, best first; ties by depth, then by the tokens."""
    level: list[tuple[int, ...]] = [()]
    found: list[tuple[int, ...]] = []
    for _ in range(max_depth):
        level = [
            child
            for path in level
            for child in sorted(
                ((*path, token) for token in range(VOCAB)), key=lambda child: (-score(child), child)
            )[:branching]
        ]
        found += level
    return sorted(found, key=lambda path: (-score(path), len(path), path))
