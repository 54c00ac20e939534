"""Negative controls: the same combination, broken on purpose. A check that does not notice them has no power.

Nothing is edited: a control wraps the verifier, the drafter or the random numbers of a running engine. Each says
which rules it can bias at all; what remains is tried, and one that changes no token at the same seeds never had an
opportunity (nothing was rejected, no node had two children) and says nothing about power.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, Stream, TokenTree
from specdec.core.sampling import sample
from specdec.drafters.base import Commit, DraftBatch, Drafter
from specdec.engine.engine import Engine
from specdec.engine.step import SpeculativeStep
from specdec.verifiers.base import Acceptance, TargetProbs, Verifier
from specdec.verifiers.walk import acceptance_of

FORCED_SHARE = 0.3
# Nodes that no tree has: their coins belong to the controls alone.
_OWN_COIN = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What decides whether a control can bias a combination."""

    law: ProposalLaw
    reproduces: bool
    """The rule draws plain decoding's own tokens: neither q nor the order of siblings can matter."""
    distance: float | None
    """Mean total variation of p and q over the nodes whose children were drawn; None if none were."""

    @property
    def q_is_p(self) -> bool:
        """The drafter is the target: what it draws is right whatever happens to it."""
        return self.distance is not None and self.distance < 1e-3


@dataclass(frozen=True, kw_only=True)
class Control:
    """One way to break a combination."""

    name: str
    description: str
    applies: Callable[[Conditions], bool]
    install: Callable[[SpeculativeStep], None]


@contextmanager
def broken(engine: Engine, control: Control) -> Iterator[None]:
    """Breaks an engine for a while."""
    runner = engine.step_runner
    before = runner.verifier, runner.drafter, runner.make_rng
    control.install(runner)
    try:
        yield
    finally:
        runner.verifier, runner.drafter, runner.make_rng = before


class _Wrapped(Verifier):
    """A rule inside a broken one."""

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner
        # The engine asks the rule it runs, not its class.
        self.greedy_only = inner.greedy_only  # type: ignore[misc]

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        return self.inner.verify(tree, p, rng)


class FlattenedQ(_Wrapped):
    """Is told that tokens were drawn uniformly from what q allows."""

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if tree.q is not None:
            support = (tree.q > 0).float()
            tree = replace(tree, q=support / support.sum(-1, keepdim=True))
        return self.inner.verify(tree, p, rng)


class SwappedLaws(_Wrapped):
    """Takes p for q and q for p wherever children were drawn."""

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if tree.q is None or tree.q_row is None:
            return self.inner.verify(tree, p, rng)
        drawn = (tree.q_row >= 0).nonzero().squeeze(1)
        if not len(drawn):
            return self.inner.verify(tree, p, rng)
        q_row = torch.full_like(tree.q_row, -1).index_copy_(
            0, drawn, torch.arange(len(drawn), device=drawn.device)
        )
        swapped = replace(tree, q=p.rows(drawn), q_row=q_row)
        return self.inner.verify(swapped, _DraftInstead(p, tree), rng)


class _DraftInstead(TargetProbs):
    """Target distributions that are the drafter's wherever children were drawn."""

    def __init__(self, p: TargetProbs, tree: TokenTree) -> None:
        super().__init__(p.logits, tree, p.sampling)

    def rows(self, nodes: Tensor) -> Tensor:
        assert self.tree.q is not None
        assert self.tree.q_row is not None
        row = self.tree.q_row[nodes]
        return torch.where((row >= 0).unsqueeze(1), self.tree.q[row.clamp(min=0)], super().rows(nodes))


class CorrectedFromP(_Wrapped):
    """Draws corrections from p itself, as if nothing had been rejected."""

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        right = self.inner.verify(tree, p, rng)
        last = _last_nodes(tree, right)
        redrawn = _draw(tree, p, rng, last)
        rejected = tree.first_child[last] >= 0
        return replace(right, next_token=torch.where(rejected, redrawn, right.next_token))


class ForcedAcceptance(_Wrapped):
    """Now and then accepts the first drafted token, whatever p says, and nothing else."""

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        right = self.inner.verify(tree, p, rng)
        first = tree.first_child[tree.roots]  # [B]
        rows = torch.arange(tree.batch_size, device=first.device)
        coin = rng.uniform(rows, tree.root_positions, torch.full_like(rows, _OWN_COIN + 1), Stream.ACCEPT)
        forced = (coin < FORCED_SHARE) & (first >= 0)
        last = torch.where(forced, first, _last_nodes(tree, right))
        next_token = torch.where(forced, _draw(tree, p, rng, last), right.next_token)
        return acceptance_of(tree, last, next_token)


class OneCoin(CounterRng):
    """The same coin for every purpose and every level of a request's step."""

    def __init__(self, seeds: Tensor) -> None:
        super().__init__(seeds)
        self._step = torch.full_like(seeds, -1)

    def uniform(self, requests: Tensor, positions: Tensor, nodes: Tensor, stream: Stream) -> Tensor:
        return super().uniform(
            requests, self._of_step(requests, positions), torch.zeros_like(positions), Stream.TARGET
        )

    def race(self, requests: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        return super().race(requests, self._of_step(requests, positions), vocab_size)

    def _of_step(self, requests: Tensor, positions: Tensor) -> Tensor:
        """The position each request asked for first in this step."""
        new = self._step[requests] < 0
        self._step[requests[new]] = positions[new]
        return self._step[requests]


class SortedSiblings(Drafter):
    """Drawn siblings in the order of their q, the likeliest first."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.law = inner.law
        self.max_nodes = inner.max_nodes
        self.features = inner.features

    def propose(self, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        return sort_siblings(self.inner.propose(batch, budget))

    def observe(self, commit: Commit) -> None:
        self.inner.observe(commit)

    def free(self, request_ids: Sequence[int]) -> None:
        self.inner.free(request_ids)

    def memory_bytes(self) -> int:
        return self.inner.memory_bytes()


def sort_siblings(tree: TokenTree) -> TokenTree:
    """The same trees with the children of each node sorted by their q, falling; equal ones keep their order."""
    if tree.q is None or tree.q_row is None:
        return tree
    parents = tree.flat_parents.tolist()
    row = tree.q_row[tree.flat_parents.clamp(min=0)]
    q = tree.q[row.clamp(min=0), tree.tokens].tolist()  # of each node
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    for root in tree.roots.tolist():
        waiting = [root]
        while waiting:
            node = waiting.pop(0)
            order.append(node)
            waiting += sorted(children.get(node, ()), key=lambda child: -q[child])
    new_index = {node: index for index, node in enumerate(order)}
    offsets = tree.host_offsets
    owner = tree.request_of_node.tolist()
    new_parents = [
        -1 if parents[node] < 0 else new_index[parents[node]] - offsets[owner[node]] for node in order
    ]

    def moved(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[order]

    return replace(
        tree,
        tokens=tree.tokens[order],
        parents=torch.tensor(new_parents, device=tree.tokens.device),
        depth=tree.depth[order],
        q_row=moved(tree.q_row),
        score=moved(tree.score),
        draft_slots=moved(tree.draft_slots),
    )


def _last_nodes(tree: TokenTree, acceptance: Acceptance) -> Tensor:
    """`[B]` int64, the deepest accepted node of each request, its root if there is none."""
    return torch.cat((tree.roots.unsqueeze(1), acceptance.path), dim=1).amax(1)


def _draw(tree: TokenTree, p: TargetProbs, rng: CounterRng, nodes: Tensor) -> Tensor:
    """A token from p after each request's node, with a coin of the controls' own."""
    rows = torch.arange(len(nodes), device=nodes.device)
    coins = rng.uniform(rows, tree.positions[nodes] + 1, torch.full_like(rows, _OWN_COIN), Stream.RESIDUAL)
    return sample(p.rows(nodes), coins)


def _wrap_verifier(wrapper: Callable[[Verifier], Verifier]) -> Callable[[SpeculativeStep], None]:
    def install(runner: SpeculativeStep) -> None:
        runner.verifier = wrapper(runner.verifier)

    return install


def _sort(runner: SpeculativeStep) -> None:
    assert runner.drafter is not None
    runner.drafter = SortedSiblings(runner.drafter)


def _share_coins(runner: SpeculativeStep) -> None:
    runner.make_rng = OneCoin


_SIBLING_LAWS = (ProposalLaw.IID, ProposalLaw.WITHOUT_REPLACEMENT)

CONTROLS = (
    Control(
        name="q flattened",
        description="the recorded q is uniform where the true one is not",
        applies=lambda on: on.law.needs_q and not on.reproduces,
        install=_wrap_verifier(FlattenedQ),
    ),
    Control(
        name="p and q swapped",
        description="the target's and the drafter's distributions change places",
        applies=lambda on: on.law.needs_q and not on.q_is_p,
        install=_wrap_verifier(SwappedLaws),
    ),
    Control(
        name="one coin",
        description="all coins of a request's step are the same",
        applies=lambda on: True,
        install=_share_coins,
    ),
    Control(
        name="siblings sorted",
        description="drawn siblings are sorted by q",
        applies=lambda on: on.law in _SIBLING_LAWS and not on.reproduces and not on.q_is_p,
        install=_sort,
    ),
    Control(
        name="residual is p",
        description="corrections are drawn from p, not from what the rejection leaves of it",
        applies=lambda on: not on.q_is_p,
        install=_wrap_verifier(CorrectedFromP),
    ),
    Control(
        name="forced acceptance",
        description=f"the first drafted token is accepted in {FORCED_SHARE:.0%} of the steps, whatever it is",
        applies=lambda on: not on.q_is_p or on.reproduces,
        install=_wrap_verifier(ForcedAcceptance),
    ),
)
