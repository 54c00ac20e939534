"""The one definition of acceptance numbers; every report and log takes them from here.

Conventions: a step is one verification of a request; the prefill that yields the first token is not a step.
Steps without drafts count as steps (they emit one token) and never as drafted. `num_accepted` counts drafted
tokens that were kept, so tokens cut off by EOS are not accepted. The acceptance length includes the bonus
or correction token: 1.0 is plain decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class SpeculationStats:
    """Counts over the steps of one request, or of many (`merge`)."""

    num_steps: int = 0
    num_emitted: int = 0
    """Tokens emitted by steps; completion tokens are these plus the prefill token."""
    num_drafted: int = 0
    num_accepted: int = 0
    num_prefill_tokens: int = 0
    """Tokens emitted by prefill: one a request that got so far."""
    accepted_counts: Counter[int] = field(default_factory=Counter)
    """How many steps accepted exactly k drafted tokens."""
    attempted_counts: Counter[int] = field(default_factory=Counter)
    """How many steps had a tree of depth k."""
    trials: Counter[int] = field(default_factory=Counter)
    """How many steps accepted k - 1 tokens and had proposed a k-th."""
    rank_counts: Counter[int] = field(default_factory=Counter)
    """How often the child of sibling rank r was accepted; ranks count from 0."""
    rank_trials: Counter[int] = field(default_factory=Counter)
    """How often a node that was reached had a child of sibling rank r."""

    def record_step(
        self,
        *,
        num_drafted: int,
        tree_depth: int,
        num_accepted: int,
        num_emitted: int,
        at_leaf: bool,
        ranks: Sequence[int] = (),
        num_children: Sequence[int] = (),
    ) -> None:
        """Adds one step.

        Args:
            num_drafted: nodes of the tree, root not counted.
            tree_depth: levels of the tree.
            num_accepted: drafted tokens the verifier accepted, before any cut.
            num_emitted: tokens kept, correction or bonus included.
            at_leaf: the last accepted node has no children, so nothing was rejected.
            ranks: sibling rank of each accepted node.
            num_children: children of the root and of each accepted node.
        """
        kept = min(num_accepted, num_emitted)
        self.num_steps += 1
        self.num_emitted += num_emitted
        self.num_drafted += num_drafted
        self.num_accepted += kept
        self.accepted_counts[kept] += 1
        self.attempted_counts[tree_depth] += 1
        # A step cut inside its accepted tokens, or accepted down to a leaf, rejected nothing.
        undecided = at_leaf or num_emitted <= num_accepted
        for level in range(1, kept + (0 if undecided else 1) + 1):
            self.trials[level] += 1
        self.rank_counts.update(ranks[:kept])
        # A node whose accepted child was cut off decided nothing.
        for count in num_children[: kept + (0 if num_emitted <= num_accepted else 1)]:
            self.rank_trials.update(range(count))

    @property
    def acceptance_length(self) -> float | None:
        """τ: tokens a step, bonus or correction included; None without steps."""
        return self.num_emitted / self.num_steps if self.num_steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def max_depth(self) -> int:
        return max((depth for depth, count in self.attempted_counts.items() if count), default=0)

    def survival(self) -> list[float]:
        """P(accept >= k) over all steps, for k = 1 to the deepest tree."""
        if not self.num_steps:
            return []
        return [
            sum(count for kept, count in self.accepted_counts.items() if kept >= k) / self.num_steps
            for k in range(1, self.max_depth + 1)
        ]

    def conditional(self) -> list[float | None]:
        """P(accept k given k - 1 accepted and a k-th proposed), for k = 1 to the deepest tree."""
        rates: list[float | None] = []
        for k in range(1, self.max_depth + 1):
            accepted = sum(count for kept, count in self.accepted_counts.items() if kept >= k)
            rates.append(accepted / self.trials[k] if self.trials[k] else None)
        return rates

    def by_rank(self) -> list[float]:
        """P(the child of sibling rank r is accepted given that its parent is), for r = 0 to the widest node.

        Sequoia takes this as its acceptance vector.
        """
        width = max((rank + 1 for rank, count in self.rank_trials.items() if count), default=0)
        return [self.rank_counts[rank] / self.rank_trials[rank] for rank in range(width)]

    @staticmethod
    def merge(parts: Sequence[SpeculationStats]) -> SpeculationStats:
        """Sums counts, so every step weighs the same."""
        total = SpeculationStats()
        for part in parts:
            total.num_steps += part.num_steps
            total.num_emitted += part.num_emitted
            total.num_drafted += part.num_drafted
            total.num_accepted += part.num_accepted
            total.num_prefill_tokens += part.num_prefill_tokens
            total.accepted_counts += part.accepted_counts
            total.attempted_counts += part.attempted_counts
            total.trials += part.trials
            total.rank_counts += part.rank_counts
            total.rank_trials += part.rank_trials
        return total


@dataclass(kw_only=True)
class StepTimes:
    """Seconds a step spent in each phase."""

    schedule: float = 0.0
    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        return self.schedule + self.draft + self.forward + self.verify + self.commit

    @property
    def bookkeeping(self) -> float:
        """Everything but the models and the sampling mathematics."""
        return self.schedule + self.commit

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(
            schedule=self.schedule + other.schedule,
            draft=self.draft + other.draft,
            forward=self.forward + other.forward,
            verify=self.verify + other.verify,
            commit=self.commit + other.commit,
        )
