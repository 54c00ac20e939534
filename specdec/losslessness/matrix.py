"""`check_all`: every legal combination of what is registered, on a tiny target.

Each combination passes the same checks as a single one, with fewer samples; the law is tested besides over all
combinations of a rule and a law together, where small mistakes add up. The controls are run once for each rule and
law, on the first combination that gives them an opportunity.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch

from specdec.core import ProposalLaw
from specdec.losslessness.cell import WARPS, Cell, CellRunner, MemberReport
from specdec.losslessness.check import CheckConfig
from specdec.losslessness.members import Member, members
from specdec.losslessness.power import ControlResult
from specdec.losslessness.result import Verdict, p_text
from specdec.losslessness.sampled import LONGEST, SEEDS_A_MEMBER, SEEDS_A_RUN, SHORTEST, num_tests
from specdec.losslessness.streams import NUM_TESTS
from specdec.losslessness.tiny import tiny_target
from specdec.models.target import TargetModel
from specdec.verifiers.registry import VERIFIERS

CellResult = tuple[list[MemberReport], list[ControlResult]]
# On one core of a laptop: the checks of a combination without its law, the controls of a cell, and a request.
_SECONDS_A_MEMBER, _SECONDS_A_CELL, _SECONDS_A_REQUEST = 0.3, 2.5, 400e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixReport:
    """What a run over all combinations found."""

    target: TargetModel
    cells: Sequence[Cell]
    config: CheckConfig
    threshold: float
    num_samples: int
    """Requests of each combination for each way to draw."""
    skipped: Sequence[str]
    """What is registered and could not be covered, with the reason."""
    verdict: Verdict
    reasons: Sequence[str]
    seconds: float

    @property
    def num_members(self) -> int:
        return sum(len(cell.reports) for cell in self.cells)


def check_all(
    config: CheckConfig | None = None,
    *,
    workers: int = 1,
    only: Callable[[Member], bool] = lambda member: True,
    progress: Callable[[Cell], None] = lambda cell: None,
) -> MatrixReport:
    """Checks every legal combination.

    Args:
        config: how much to do; the budget, 240 seconds by default, decides the number of samples.
        workers: processes; more than one know only what is registered by entry points.
        only: which combinations to check.
        progress: told of every cell that is done.
    """
    config = config or CheckConfig(budget=240.0)
    start = time.perf_counter()
    skipped: list[str] = []
    cells = _cells([member for member in members(skipped) if only(member)])
    num_checked = sum(len(cell.chosen) for cell in cells)
    num_all = num_checked * (num_tests(len(WARPS)) + NUM_TESTS) + len(cells) * (LONGEST + 1 - SHORTEST)
    plan = _Plan(
        threshold=config.alpha / max(num_all, 1),
        num_samples=_samples_for(config.budget * workers, num_checked, len(cells)),
    )
    run = _run_here if workers == 1 else _run_in_workers
    for cell, (reports, controls) in run(cells, plan, config.seed * SEEDS_A_RUN, workers):
        cell.reports, cell.controls = reports, controls
        progress(cell)
    outcome, reasons = _verdict(cells, plan.threshold)
    return MatrixReport(
        target=tiny_target(),
        cells=cells,
        config=config,
        threshold=plan.threshold,
        num_samples=plan.num_samples,
        skipped=skipped,
        verdict=outcome,
        reasons=reasons,
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    threshold: float
    num_samples: int


def _run_here(
    cells: Sequence[Cell], plan: _Plan, first_seed: int, workers: int
) -> Iterator[tuple[Cell, CellResult]]:
    runner = CellRunner(plan.threshold, plan.num_samples)
    for cell, seed in zip(cells, _seeds(cells, first_seed), strict=True):
        yield cell, runner.run(cell.chosen, seed, cell.lossy)


def _run_in_workers(
    cells: Sequence[Cell], plan: _Plan, first_seed: int, workers: int
) -> Iterator[tuple[Cell, CellResult]]:
    # A forked process would share the state of torch's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as executor:
        waiting = {
            executor.submit(_run_by_name, [own.name for own in cell.chosen], plan, seed, cell.lossy): cell
            for cell, seed in sorted(
                zip(cells, _seeds(cells, first_seed), strict=True), key=lambda pair: -len(pair[0].chosen)
            )
        }
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def _run_by_name(names: Sequence[str], plan: _Plan, first_seed: int, lossy: bool) -> CellResult:
    """In a worker: combinations hold models and functions, which don't travel, so they are made again."""
    runner, known = _worker_state(plan)
    return runner.run([known[name] for name in names], first_seed, lossy)


@cache
def _worker_state(plan: _Plan) -> tuple[CellRunner, dict[str, Member]]:
    torch.set_num_threads(1)
    return CellRunner(plan.threshold, plan.num_samples), {member.name: member for member in members([])}


def _seeds(cells: Sequence[Cell], first_seed: int) -> list[int]:
    """The first seed of each cell."""
    counts = [2 * len(cell.chosen) * SEEDS_A_MEMBER for cell in cells]
    return [first_seed + before for before in accumulate(counts[:-1], initial=0)]


def _cells(chosen: Sequence[Member]) -> list[Cell]:
    """The combinations by verifier and law. Lossy rules are measured once a law: there is nothing to prove."""
    cells: dict[tuple[str, ProposalLaw], Cell] = {}
    for member in chosen:
        name = member.config.verifier
        lossy = VERIFIERS.get(name).lossy
        cell = cells.setdefault((name, member.law), Cell(verifier=name, law=member.law, lossy=lossy))
        if not (lossy and cell.chosen):
            cell.chosen.append(member)
    return sorted(cells.values(), key=lambda cell: (cell.verifier, cell.law.value))


def _samples_for(budget: float, num_members: int, num_cells: int) -> int:
    """Requests a case, from typical costs and not from the clock, so that a run can be repeated: a power of two."""
    # A quarter is kept back: machines and combinations differ.
    seconds = 0.75 * budget - num_members * _SECONDS_A_MEMBER - num_cells * _SECONDS_A_CELL
    wanted = seconds / _SECONDS_A_REQUEST / len(WARPS) / max(num_members, 1)
    return int(2 ** min(12, math.floor(math.log2(max(wanted, 128)))))


def _verdict(cells: Sequence[Cell], threshold: float) -> tuple[Verdict, list[str]]:
    """Over all rules that claim to be exact."""
    failed, weak = [], []
    for cell in cells:
        if cell.lossy:
            continue
        where = f"{cell.verifier} on {cell.law.value} trees"
        failed += [
            f"{own.name}: {reason}"
            for own in cell.reports
            if own.verdict is Verdict.NOT_EXACT
            for reason in own.reasons
        ]
        failed += [
            f"{where}: all combinations together, {length} tokens ({p_text(test.p_value)})"
            for length, test in cell.pooled().items()
            if test.p_value < threshold
        ]
        weak += [f"{where}: {reason}" for reason in cell.missed()]
    if failed:
        return Verdict.NOT_EXACT, failed
    return (Verdict.UNDECIDED, weak) if weak else (Verdict.EXACT, [])
