"""The exact law of what the shipped proposers and verifiers do, by walking all outcomes of their coins.

A game is a function of coins; for one coin, the others fixed, its outcome is piecewise constant. The walk asks
the game which coin it needs next, finds the pieces of that coin by bisection, and goes on in each of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core import CounterRng, SamplingBatch, SamplingParams, Stream, TokenTree
from specdec.core.sampling import warp
from specdec.drafters.base import DraftBatch, DraftModel, TreeProposer
from specdec.drafters.trees.builder import Frontier
from specdec.verifiers.base import Acceptance, TargetProbs, Verifier

LAST_COIN = 1 - 2.0**-53
ROOT_POSITION = 3
_RESOLUTION = 1e-9
_GRID = [*(index / 8 for index in range(8)), LAST_COIN]

Key = tuple[int, ...]
Conditional = Callable[[tuple[int, ...]], Tensor]
"""The next-token probabilities `[V]` after a path of tokens."""


class Coins(CounterRng):
    """Coins set by a test, one table a request; a coin that is not set is 0, and all asked for are noted."""

    def __init__(self, tables: Sequence[Mapping[Key, float]]) -> None:
        super().__init__(torch.arange(len(tables)))
        self.tables = tables
        self.asked: list[dict[Key, None]] = [{} for _ in tables]

    def key(self, position: int, node: int, stream: Stream) -> Key:
        return position, node, int(stream)

    def uniform(self, requests: Tensor, positions: Tensor, nodes: Tensor, stream: Stream) -> Tensor:
        values = []
        for request, position, node in zip(
            requests.tolist(), positions.tolist(), nodes.tolist(), strict=True
        ):
            key = self.key(position, node, stream)
            self.asked[request].setdefault(key)
            values.append(self.tables[request].get(key, 0.0))
        return torch.tensor(values, dtype=torch.float64)


class ConstantCoin(CounterRng):
    """The same coin for everything."""

    def __init__(self, coin: float) -> None:
        super().__init__(torch.zeros(1, dtype=torch.int64))
        self.coin = coin

    def uniform(self, requests: Tensor, positions: Tensor, nodes: Tensor, stream: Stream) -> Tensor:
        return torch.full(requests.shape, self.coin, dtype=torch.float64)


class Outcome(NamedTuple):
    """What happened to one request."""

    drafted: tuple[int, ...]
    path: tuple[int, ...]
    """Accepted nodes, the root excluded."""
    tokens: tuple[int, ...]


class TableModel(DraftModel):
    """A draft model given by its conditional probabilities."""

    def __init__(self, conditional: Conditional) -> None:
        self.conditional = conditional

    def expand(self, frontier: Frontier) -> Tensor:
        return torch.stack([self.conditional(tuple(path)) for path in frontier.paths()]).log()


@dataclass(frozen=True, kw_only=True)
class Game:
    """Proposing and verifying one step with a target and a drafter given as tables."""

    target: Conditional
    verifier: Verifier
    propose: Callable[[DraftBatch], TokenTree]
    params: SamplingParams = field(default_factory=SamplingParams)

    def play(self, rng: CounterRng, count: int, cases: Sequence[int] | None = None) -> list[Outcome]:
        """The same request `count` times in one batch; `cases` become the request ids, for `propose` to read."""
        batch = draft_batch([self.params] * count, rng, cases=cases)
        tree = self.propose(batch)
        tree.validate()
        p = target_probs(tree, self.target, batch.sampling)
        return outcomes_of(tree, self.verifier.verify(tree, p, rng))

    def warped(self, path: tuple[int, ...]) -> Tensor:
        return warped(self.target, path, self.params)


def draft_batch(
    params: Sequence[SamplingParams],
    rng: CounterRng,
    max_depth: int = 100,
    cases: Sequence[int] | None = None,
) -> DraftBatch:
    """Requests that hold four committed zeros; no pages. `cases` are their ids, 0, 1, ... if None."""
    count = len(params)
    return DraftBatch(
        request_ids=list(range(count)) if cases is None else cases,
        token_ids=[[0] * (ROOT_POSITION + 1)] * count,
        num_prompt_tokens=[1] * count,
        max_depths=[max_depth] * count,
        root_positions=torch.full((count,), ROOT_POSITION),
        roots=torch.zeros(count, dtype=torch.int64),
        block_tables=torch.zeros(count, 1, dtype=torch.int32),
        sampling=SamplingBatch(params, torch.device("cpu")),
        rng=rng,
    )


def grow(proposer: TreeProposer, draft: Conditional) -> Callable[[DraftBatch], TokenTree]:
    """Proposes with a shipped proposer and a table of q."""

    def propose(batch: DraftBatch) -> TokenTree:
        return proposer.propose(TableModel(draft), batch, [proposer.max_nodes] * batch.size)

    return propose


def fixed_tree(entries: Sequence[tuple[int, int]], **fields: object) -> Callable[[DraftBatch], TokenTree]:
    """Proposes the same `(token, parent)` nodes always."""

    def propose(batch: DraftBatch) -> TokenTree:
        return TokenTree.from_lists(batch.roots, [entries] * batch.size, batch.root_positions, **fields)

    return propose


def target_probs(tree: TokenTree, target: Conditional, sampling: SamplingBatch) -> TargetProbs:
    """The target's table at every node of a tree."""
    rows = [target(path) for paths in node_paths(tree) for path in paths]
    return TargetProbs(torch.stack(rows).log(), tree, sampling)


def node_paths(tree: TokenTree) -> list[list[tuple[int, ...]]]:
    """For each request and node, the drafted tokens that lead to it."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    result = []
    for start, count in zip(tree.host_offsets, tree.num_nodes, strict=False):
        paths: list[tuple[int, ...]] = [()]
        for node in range(start + 1, start + count):
            paths.append((*paths[parents[node]], tokens[node]))
        result.append(paths)
    return result


def outcomes_of(tree: TokenTree, acceptance: Acceptance) -> list[Outcome]:
    """What a verifier decided, request by request, with its own consistency checked."""
    outcomes = []
    tokens = tree.tokens.tolist()
    for row, (start, paths) in enumerate(zip(tree.host_offsets, node_paths(tree), strict=False)):
        count = int(acceptance.num_accepted[row])
        path = [node - start for node in acceptance.path[row].tolist() if node >= 0]
        assert len(path) == count
        accepted = tuple(tokens[start + node] for node in path)
        assert not path or accepted == paths[path[-1]], "the accepted nodes are no path"
        drafted = tuple(tokens[start + 1 : start + tree.num_nodes[row]])
        outcomes.append(Outcome(drafted, tuple(path), (*accepted, int(acceptance.next_token[row]))))
    return outcomes


class _State(NamedTuple):
    """Coins that are set, the probability of that, and the case."""

    table: dict[Key, float]
    weight: float
    case: int


def exact_law(
    game: Game, coins: type[Coins] = Coins, weights: Sequence[float] = (1.0,)
) -> dict[Outcome, float]:
    """The probability of every outcome of a game.

    Args:
        game: it is played with the request id i in case i.
        coins: how coins are keyed.
        weights: probability of each case.
    """
    law: dict[Outcome, float] = defaultdict(float)
    states = [_State({}, weight, case) for case, weight in enumerate(weights)]
    while states:
        rng = coins([state.table for state in states])
        undecided = []
        outcomes = game.play(rng, len(states), [state.case for state in states])
        for state, outcome, asked in zip(states, outcomes, rng.asked, strict=True):
            key = next((key for key in asked if key not in state.table), None)
            if key is None:
                law[outcome] += state.weight
            else:
                undecided.append((state, key))
        pieces = _pieces(game, undecided, coins)
        states = [
            _State({**state.table, key: (low + high) / 2}, state.weight * (high - low), state.case)
            for (state, key), edges in zip(undecided, pieces, strict=True)
            for low, high in pairwise(edges)
        ]
    return dict(law)


def _pieces(game: Game, questions: Sequence[tuple[_State, Key]], coins: type[Coins]) -> list[list[float]]:
    """For each state and one more coin, the edges between which the outcome does not change."""

    def ask(points: Iterable[tuple[int, float]]) -> list[Outcome]:
        points = list(points)
        tables = [{**questions[index][0].table, questions[index][1]: coin} for index, coin in points]
        cases = [questions[index][0].case for index, _ in points]
        return game.play(coins(tables), len(tables), cases) if tables else []

    points = [(index, coin) for index in range(len(questions)) for coin in _GRID]
    seen = dict(zip(points, ask(points), strict=True))
    edges: list[list[float]] = [[0.0, 1.0] for _ in questions]
    open_intervals = [(index, low, high) for index in range(len(questions)) for low, high in pairwise(_GRID)]
    while open_intervals:
        changing = [(i, low, high) for i, low, high in open_intervals if seen[i, low] != seen[i, high]]
        for i, low, high in changing:
            if high - low < _RESOLUTION:
                edges[i].append((low + high) / 2)
        wide = [(i, low, high) for i, low, high in changing if high - low >= _RESOLUTION]
        middles = [(i, (low + high) / 2) for i, low, high in wide]
        seen.update(zip(middles, ask(middles), strict=True))
        open_intervals = [
            half
            for (i, low, high), (_, middle) in zip(wide, middles, strict=True)
            for half in ((i, low, middle), (i, middle, high))
        ]
    return [sorted(own) for own in edges]


def joint_law(law: Mapping[Outcome, float], target: Conditional, length: int) -> dict[tuple[int, ...], float]:
    """The law of the first `length` tokens; what a step leaves open, plain decoding continues."""
    joint: dict[tuple[int, ...], float] = defaultdict(float)
    for outcome, weight in law.items():
        known = outcome.tokens[:length]
        for rest, probability in decode_law(target, length - len(known), known).items():
            joint[known + rest] += weight * probability
    return dict(joint)


def decode_law(
    target: Conditional, length: int, prefix: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """The law of `length` tokens of plain decoding after a prefix."""
    if length == 0:
        return {(): 1.0}
    law: dict[tuple[int, ...], float] = {}
    for token, probability in enumerate(target(prefix).double().tolist()):
        if probability > 0:
            for rest, more in decode_law(target, length - 1, (*prefix, token)).items():
                law[(token, *rest)] = probability * more
    return law


def warped(conditional: Conditional, path: tuple[int, ...], params: SamplingParams) -> Tensor:
    """A conditional after the request's warping."""
    sampling = SamplingBatch([params], torch.device("cpu"))
    return warp(conditional(path).log().unsqueeze(0), sampling, torch.zeros(1, dtype=torch.int64))[0]


def constant(*probs: float) -> Conditional:
    """The same probabilities after every path."""
    row = torch.tensor(probs)
    return lambda path: row


def random_table(seed: int, vocab_size: int, sharpness: float = 1.5) -> Conditional:
    """Random probabilities that depend on the whole path."""

    @cache
    def conditional(path: tuple[int, ...]) -> Tensor:
        key = hash((seed, vocab_size, path)) % 2**31
        generator = torch.Generator().manual_seed(key)
        return (sharpness * torch.randn(vocab_size, generator=generator)).softmax(-1)

    return conditional
