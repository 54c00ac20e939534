"""Synthetic acceptance (lossy): keep as many drafted tokens as a given curve says, whatever they are.

One coin a step: the first k tokens of the leftmost path are kept with probability survival[k - 1]. For load tests
and for studies of what a drafter of a given quality would be worth.
Guarantee: none for the text; the accepted lengths follow the curve, cut at the length of the drafted path.
Laws: any, since none is kept.
Source: serving engines have such a switch for load tests; a geometric curve is the model of arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core import CounterRng, Stream, TokenTree
from specdec.core.checks import is_real
from specdec.verifiers.base import ALL_LAWS, Acceptance, TargetProbs, Verifier
from specdec.verifiers.walk import acceptance_of, draw_from_target


class SyntheticVerifier(Verifier):
    """Accepts by a given acceptance length or survival curve, not by content; for load tests."""

    laws = ALL_LAWS
    lossy = True

    def __init__(self, tau: float | None = None, survival: Sequence[float] | None = None) -> None:
        if (tau is None) == (survival is None):
            raise ValueError(
                f"tau={tau!r}, survival={survival!r}: give one of them, the acceptance length (bonus included) or "
                "the probabilities to accept at least 1, 2, ... tokens, such as verifier.args.tau=2.5"
            )
        if tau is not None and (not is_real(tau) or tau < 1):
            raise ValueError(f"tau={tau!r}: expected an acceptance length >= 1 (1 accepts nothing)")
        if survival is not None:
            _check_survival(survival)
        self.tau, self.survival = tau, survival

    def verify(self, tree: TokenTree, p: TargetProbs, rng: CounterRng) -> Acceptance:
        if tree.max_depth == 0:
            return acceptance_of(tree, tree.roots, draw_from_target(p, tree.roots, rng))
        path, length = _leftmost_paths(tree)
        curve = self._curves(length, path.shape[1] - 1)  # [B, D]
        requests = torch.arange(tree.batch_size, device=path.device)
        coins = rng.uniform(requests, tree.root_positions, torch.zeros_like(requests), Stream.ACCEPT)
        kept = torch.minimum((coins.unsqueeze(1) < curve).sum(1), length)
        last = path.gather(1, kept.unsqueeze(1)).squeeze(1)
        return acceptance_of(tree, last, draw_from_target(p, last, rng))

    def _curves(self, length: Tensor, depth: int) -> Tensor:
        """The survival curve of each request, `[B, depth]` float64, given the lengths of their paths `[B]`."""
        if self.survival is not None:
            curve = torch.zeros(depth, dtype=torch.float64, device=length.device)
            known = torch.tensor(list(self.survival[:depth]), dtype=torch.float64, device=length.device)
            curve[: len(known)] = known
            return curve.expand(len(length), depth)
        assert self.tau is not None
        levels = torch.arange(1, depth + 1, device=length.device)
        rate = geometric_rate(self.tau - 1, length)
        return rate.unsqueeze(1) ** levels


def geometric_rate(accepted: float, length: Tensor) -> Tensor:
    """The rate a with a + a^2 + ... + a^length = accepted, by bisection; 1 where length is too short for it.

    Args:
        accepted: expected accepted tokens.
        length: `[n]` int64.

    Returns:
        `[n]` float64.
    """
    low = torch.zeros(len(length), dtype=torch.float64, device=length.device)
    high = torch.ones_like(low)
    levels = torch.arange(1, int(length.max()) + 1, device=length.device)  # [D]
    within = levels <= length.unsqueeze(1)
    for _ in range(50):
        middle = (low + high) / 2
        too_much = (middle.unsqueeze(1) ** levels * within).sum(1) > accepted
        low, high = torch.where(too_much, low, middle), torch.where(too_much, middle, high)
    return high


def _leftmost_paths(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """The paths of first children, root included, `[B, 1 + D]` (the last node pads), and their lengths `[B]`."""
    columns, length = [tree.roots], torch.zeros_like(tree.roots)
    for _ in range(tree.max_depth):
        child = tree.first_child[columns[-1]]
        length += child >= 0
        columns.append(torch.where(child >= 0, child, columns[-1]))
    return torch.stack(columns, dim=1), length


def _check_survival(survival: Sequence[float]) -> None:
    values = list(survival) if not isinstance(survival, str) else []
    valid = bool(values) and all(is_real(value) and 0 <= value <= 1 for value in values)
    if not valid or values != sorted(values, reverse=True):
        raise ValueError(
            f"survival={survival!r}: expected probabilities in [0, 1] that never rise, such as [0.8, 0.6, 0.4]"
        )
