"""The batched rules against scalar ones on random trees: one request, one node, one coin at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from specdec_tests.drawn import drawn_tree
from specdec_tests.laws import (
    ROOT_POSITION,
    Conditional,
    Outcome,
    draft_batch,
    outcomes_of,
    random_table,
    target_probs,
    warped,
)

from specdec.core import CounterRng, ProposalLaw, SamplingParams, Stream, TokenTree
from specdec.core.sampling import sample
from specdec.drafters.base import DraftBatch
from specdec.verifiers.registry import VERIFIERS

VOCAB = 5
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5, top_k=3),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.4, top_p=0.7),
]
CHAIN, IID, WITHOUT = ProposalLaw.CHAIN, ProposalLaw.IID, ProposalLaw.WITHOUT_REPLACEMENT
TARGET, DRAFT = random_table(7, VOCAB), random_table(8, VOCAB)


class Scalar:
    """One request of a drafted tree, all in float64."""

    def __init__(
        self, tree: TokenTree, row: int, params: SamplingParams, seed: int, target: Conditional
    ) -> None:
        start, end = tree.host_offsets[row], tree.host_offsets[row + 1]
        self.tokens = tree.tokens[start:end].tolist()
        self.parents = tree.parents[start:end].tolist()
        self.law = tree.laws[row]
        rows = tree.q_row[start:end].tolist() if tree.q_row is not None else []
        self.q = {node: tree.q[index].double() for node, index in enumerate(rows) if index >= 0}
        self.params, self.target = params, target
        self.rng = CounterRng(torch.tensor([seed]))
        self.accepted: list[int] = []

    def path_of(self, node: int) -> tuple[int, ...]:
        return () if node == 0 else (*self.path_of(self.parents[node]), self.tokens[node])

    def depth(self, node: int) -> int:
        return len(self.path_of(node))

    def p(self, node: int) -> torch.Tensor:
        return warped(self.target, self.path_of(node), self.params).double()

    def passes(self, node: int, probability: float) -> bool:
        coin = self.rng.uniform(
            torch.tensor([0]), torch.tensor([ROOT_POSITION]), torch.tensor([node]), Stream.ACCEPT
        )
        return float(coin) < probability

    def draw(self, node: int, weights: torch.Tensor, stream: Stream) -> int:
        position = torch.tensor([ROOT_POSITION + 1 + self.depth(node)])
        coin = self.rng.uniform(torch.tensor([0]), position, torch.tensor([0]), stream)
        return int(sample(weights.float().unsqueeze(0), coin))

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def finish(self, node: int, token: int) -> Outcome:
        nodes = []
        up = node
        while up:
            nodes.append(up)
            up = self.parents[up]
        return Outcome(tuple(self.tokens[1:]), tuple(nodes[::-1]), (*self.path_of(node), token))

    def follow_target(self, node: int) -> tuple[int | None, int]:
        token = self.draw(node, self.p(node), Stream.TARGET)
        return next((child for child in self.children(node) if self.tokens[child] == token), None), token


def descending(decide: Callable[[Scalar, int], tuple[int | None, int]]) -> Callable[[Scalar], Outcome]:
    def rule(request: Scalar) -> Outcome:
        node = 0
        while True:
            drawn = node in request.q and bool(request.children(node))
            child, token = decide(request, node) if drawn else request.follow_target(node)
            if child is None:
                return request.finish(node, token)
            node = child

    return rule


def reject_in_turn(request: Scalar, node: int) -> tuple[int | None, int]:
    p, q = request.p(node), request.q[node].clone()
    for child in request.children(node):
        token = request.tokens[child]
        if request.passes(child, float(p[token] / q[token])):
            return child, -1
        p = (p - q).clamp(min=0)
        p /= p.sum()
        if request.law is WITHOUT:
            q[token] = 0
            q /= q.sum()
    return None, request.draw(node, p, Stream.RESIDUAL)


def try_alike(request: Scalar, node: int) -> tuple[int | None, int]:
    p, q, children = request.p(node), request.q[node], request.children(node)
    k = len(children)
    low, high = 1.0, float(k)

    def b(rho: float) -> float:
        return float(torch.minimum(p / rho, q).sum())

    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - (1 - b(middle)) ** k > middle * b(middle) else (low, middle)
    for child in children:
        if request.passes(child, float(p[request.tokens[child]] / (high * q[request.tokens[child]]))):
            return child, -1
    gain = (1 - (1 - b(high)) ** k) / b(high) if b(high) else k
    return None, request.draw(node, (p - torch.minimum(p / high, q) * gain).clamp(min=0), Stream.RESIDUAL)


class Traversal:
    """Traversal verification as the paper has it: leaf by leaf, on a tree that shrinks."""

    def __init__(self, request: Scalar) -> None:
        self.request = request
        self.live = set(range(len(request.tokens)))
        self.p = {node: request.p(node) for node in self.live}
        self.q = {node: row.clone() for node, row in request.q.items()}
        self.settled = {0: 1.0}
        self.changed: set[int] = set()

    def acc(self, node: int) -> float:
        if node in self.settled:
            return self.settled[node]
        parent, token = self.request.parents[node], self.request.tokens[node]
        return min(1.0, self.acc(parent) * float(self.p[parent][token] / self.q[parent][token]))

    def leftmost_leaf(self) -> int:
        node = 0
        while alive := [child for child in self.request.children(node) if child in self.live]:
            node = alive[0]
        return node

    def run(self) -> Outcome:
        leaf = self.leftmost_leaf()
        while leaf and not self.request.passes(leaf, self.acc(leaf)):
            self.reject(leaf)
            leaf = self.leftmost_leaf()
        stream = Stream.RESIDUAL if leaf in self.changed else Stream.TARGET
        return self.request.finish(leaf, self.request.draw(leaf, self.p[leaf], stream))

    def reject(self, leaf: int) -> None:
        parent = self.request.parents[leaf]
        acc = self.acc(parent)
        rest = (acc * self.p[parent] - self.q[parent]).clamp(min=0)
        mass = float(rest.sum())
        self.settled[parent] = mass / (mass + 1 - acc) if mass else 0.0
        if mass:
            self.p[parent] = rest / mass
        if self.request.law is WITHOUT:
            self.q[parent][self.request.tokens[leaf]] = 0
            self.q[parent] /= self.q[parent].sum()
        self.changed.add(parent)
        self.live.discard(leaf)


def verify_block(request: Scalar) -> Outcome:
    """Block verification as the paper has it: all coins at once, the last success counts."""
    length = len(request.tokens) - 1
    pi, kept, weights = [1.0], 0, {}
    for i in range(1, length + 1):
        token, q = request.tokens[i], request.q[i - 1]
        pi.append(min(1.0, pi[-1] * float(request.p(i - 1)[token] / q[token])))
    for i in range(length + 1):
        if i == length:
            passes = pi[i]
        else:
            weights[i] = (pi[i] * request.p(i) - request.q[i]).clamp(min=0)
            mass = float(weights[i].sum())
            passes = mass / (mass + 1 - pi[i]) if mass + 1 - pi[i] > 0 else 1.0
        if i and request.passes(i, passes):
            kept = i
    if kept == length:
        return request.finish(kept, request.draw(kept, request.p(kept), Stream.TARGET))
    return request.finish(kept, request.draw(kept, weights[kept], Stream.RESIDUAL))


def verify_target_only(request: Scalar) -> Outcome:
    node = 0
    while True:
        child, token = request.follow_target(node)
        if child is None:
            return request.finish(node, token)
        node = child


RULES: dict[str, Callable[[Scalar], Outcome]] = {
    "target_only": verify_target_only,
    "token": descending(reject_in_turn),
    "rrs": descending(reject_in_turn),
    "rrsw": descending(reject_in_turn),
    "kseq": descending(try_alike),
    "traversal": lambda request: Traversal(request).run(),
    "block": verify_block,
}
CASES = [(name, law) for name in RULES for law in ProposalLaw if law in VERIFIERS.get(name).laws]


def random_shape(seed: int, law: ProposalLaw) -> list[int]:
    chooser = random.Random(seed)
    size = chooser.randrange(1, 12)
    return [node if law is CHAIN else chooser.randrange(max(0, node - 5), node + 1) for node in range(size)]


def propose(batch: DraftBatch, seed: int, law: ProposalLaw) -> TokenTree:
    if law is ProposalLaw.DETERMINISTIC:
        chooser = random.Random(seed)
        trees = [
            [(chooser.randrange(VOCAB), parent) for parent in random_shape(seed + row, law)]
            for row in range(batch.size)
        ]
        return TokenTree.from_lists(batch.roots, trees, batch.root_positions, law)
    return drawn_tree(random_shape(seed, law), DRAFT, law)(batch)


@pytest.mark.parametrize(("name", "law"), CASES, ids=str)
def test_equals_the_scalar_rule(name, law):
    depths = []
    for seed in range(40):
        params = [PARAMS[(seed + row) % len(PARAMS)] for row in range(6)]
        seeds = [1000 * seed + row for row in range(6)]
        batch = draft_batch(params, CounterRng(torch.tensor(seeds)))
        tree = propose(batch, seed, law)
        p = target_probs(tree, TARGET, batch.sampling)
        outcomes = outcomes_of(tree, VERIFIERS.create(name).verify(tree, p, batch.rng))
        for row, outcome in enumerate(outcomes):
            expected = RULES[name](Scalar(tree, row, params[row], seeds[row], TARGET))
            assert outcome == expected, (seed, row)
            depths.append(len(outcome.path))
    assert max(depths) > 1
    assert min(depths) == 0


@pytest.mark.parametrize(
    ("name", "law"), [case for case in CASES if case[1] is not ProposalLaw.DETERMINISTIC], ids=str
)
def test_batch_mates_change_nothing(name, law):
    def outcomes(rows: Sequence[int]) -> list[Outcome]:
        batch = draft_batch([PARAMS[row % 4] for row in rows], CounterRng(torch.tensor(rows) * 7))
        tree = drawn_tree(random_shape(3, law), DRAFT, law)(batch)
        return outcomes_of(
            tree, VERIFIERS.create(name).verify(tree, target_probs(tree, TARGET, batch.sampling), batch.rng)
        )

    rows = list(range(24))
    together = outcomes(rows)
    shuffled = random.Random(1).sample(rows, len(rows))
    assert [outcomes([row])[0] for row in rows] == together
    assert outcomes(shuffled) == [together[row] for row in shuffled]


def test_rules_declare_their_laws():
    """The table of design and documentation."""
    deterministic = ProposalLaw.DETERMINISTIC
    assert {name: set(VERIFIERS.get(name).laws) for name in RULES if name != "target_only"} == {
        "token": {CHAIN, deterministic},
        "rrs": {CHAIN, IID},
        "rrsw": {CHAIN, WITHOUT},
        "kseq": {CHAIN, IID},
        "traversal": {CHAIN, IID, WITHOUT},
        "block": {CHAIN},
    }
    for name in ("greedy", "target_only", "gumbel"):
        assert VERIFIERS.get(name).laws == set(ProposalLaw)
    lossy = {name for name in VERIFIERS.names() if VERIFIERS.get(name).lossy}
    assert lossy == {"typical", "entropy_gate", "synthetic"}
