"""What verification costs, by rule, law and tree size, beside the step it is part of.

The trees are drawn from a q that is p with noise, as rules differ in how far they go down. Logits are random with
the spread of a language model's. All rows are measured in turn, round after round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, SamplingBatch, SamplingParams, TokenTree
from specdec.evaluation.memory import peak_bytes
from specdec.evaluation.step_bench import Lane
from specdec.evaluation.table import TextTable
from specdec.models import TargetModel, load_target
from specdec.verifiers.base import ALL_LAWS, TargetProbs, Verifier
from specdec.verifiers.registry import VERIFIERS

Result = dict[str, Any]

_LOGIT_SPREAD, _DRAFT_NOISE = 5.0, 1.0
_ARGUMENTS: dict[str, dict[str, Any]] = {"synthetic": {"tau": 2.0}}


@dataclass
class VerificationCase:
    """A rule under a law at a tree size."""

    name: str
    law: ProposalLaw
    verifier: Verifier
    tree: TokenTree
    logits: Tensor
    sampling: SamplingBatch
    num_runs: int = 0
    num_accepted: int = 0

    def run(self) -> float:
        """Seconds of one verification; the tree's derived fields are computed anew, as in a step."""
        tree = replace(self.tree)
        rng = CounterRng(torch.arange(tree.batch_size) + self.num_runs * tree.batch_size)
        start = time.perf_counter()
        p = TargetProbs(self.logits, tree, self.sampling)
        # A step looks for rows nothing can be drawn from before it verifies.
        p.invalid.any().item()
        acceptance = self.verifier.verify(tree, p, rng)
        accepted = int(acceptance.num_accepted.sum())
        elapsed = time.perf_counter() - start
        self.num_runs += 1
        self.num_accepted += accepted
        return elapsed


@torch.inference_mode()
def bench_verify(
    target: str,
    *,
    dtype: str | None,
    batch: int,
    node_counts: Sequence[int],
    params: SamplingParams,
    context: int,
    repeats: int,
) -> Result:
    """Times every registered rule.

    Args:
        target: name of a target; gives the vocabulary and the time of a step.
        dtype: weights and logits; None chooses.
        batch: requests.
        node_counts: tree sizes, roots included.
        params: warping of p and q; greedy rules run at temperature 0.
        context: tokens before the timed steps.
        repeats: measurements of each row.

    Returns:
        One entry a rule, law and size: median milliseconds, share of the step, peak bytes, accepted tokens a
        request.
    """
    model = load_target(target, dtype=dtype)
    cases = [case for nodes in node_counts for case in verification_cases(model, batch, nodes, params)]
    lanes = {nodes: Lane(model, batch, context, repeats, nodes - 1) for nodes in node_counts}
    seconds: list[list[float]] = [[] for _ in cases]
    steps: dict[int, list[float]] = {nodes: [] for nodes in node_counts}
    for round_number in range(repeats + 1):
        measured = [case.run() for case in cases]
        step_times = {nodes: _forward_and_rest(lane) for nodes, lane in lanes.items()}
        # The first round warms up.
        if round_number:
            for values, elapsed in zip(seconds, measured, strict=True):
                values.append(elapsed)
            for nodes, elapsed in step_times.items():
                steps[nodes].append(elapsed)
    rows = []
    for case, values in zip(cases, seconds, strict=True):
        nodes = case.tree.num_nodes[0]
        median, rest = statistics.median(values), statistics.median(steps[nodes])
        rows.append(
            {
                "rule": case.name,
                "law": case.law.value,
                "nodes": nodes,
                "ms": 1e3 * median,
                "share_of_step": median / (median + rest),
                "peak_bytes": peak_bytes(case.run),
                "accepted": case.num_accepted / (case.num_runs * batch),
            }
        )
    return {
        "target": target,
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": model.vocab_size,
        "batch": batch,
        "context": context,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }


def verify_table(result: Result) -> TextTable:
    """One line a rule and law: milliseconds and share of the step by tree size, then memory at the largest."""
    sizes = sorted({row["nodes"] for row in result["rows"]})
    lines = []
    for rule, law in dict.fromkeys((row["rule"], row["law"]) for row in result["rows"]):
        own = {row["nodes"]: row for row in result["rows"] if (row["rule"], row["law"]) == (rule, law)}
        cells = [f"{own[size]['ms']:.1f} ({own[size]['share_of_step']:.1%})" for size in sizes]
        last = own[sizes[-1]]
        lines.append(
            [f"{rule}, {law}", *cells, f"{last['peak_bytes'] / 2**20:.0f}", f"{last['accepted']:.2f}"]
        )
    return TextTable(
        title=f"{result['target']} ({result['dtype']}), batch {result['batch']}, "
        f"vocabulary {result['vocab_size']}, temperature {result['temperature']}, {result['threads']} threads",
        columns=["rule, law", *(f"{size} nodes" for size in sizes), "MiB", "accepted"],
        rows=lines,
        notes=[
            f"Medians of {result['repeats']} interleaved measurements in ms, warping included; in brackets the "
            f"share of a step of {result['batch']} such trees. MiB: tensors the rule makes, at the largest size."
        ],
    )


def _forward_and_rest(lane: Lane) -> float:
    """Seconds of a step without its verification."""
    lane.step()
    return lane.times[-1].total - lane.times[-1].verify


def verification_cases(
    model: TargetModel, batch: int, nodes: int, params: SamplingParams
) -> list[VerificationCase]:
    """Every registered rule under the laws it is made for; rules for any law get a deterministic tree."""
    cases = []
    trees: dict[ProposalLaw, tuple[TokenTree, Tensor]] = {}
    for name in VERIFIERS.names():
        verifier = VERIFIERS.create(name, **_ARGUMENTS.get(name, {}))
        laws = {ProposalLaw.DETERMINISTIC} if verifier.laws == ALL_LAWS else verifier.laws
        own = replace(params, temperature=0.0) if verifier.greedy_only else params
        sampling = SamplingBatch([own] * batch, model.device)
        for law in sorted(laws, key=lambda law: law.value):
            if law not in trees:
                trees[law] = _draw_tree(model, batch, nodes, law)
            tree, logits = trees[law]
            cases.append(VerificationCase(name, law, verifier, tree, logits, sampling))
    return cases


def _draw_tree(model: TargetModel, batch: int, nodes: int, law: ProposalLaw) -> tuple[TokenTree, Tensor]:
    """Binary trees, chains for CHAIN, with tokens drawn from a noisy p; the logits of p at all nodes, `[N, V]`."""
    generator = torch.Generator().manual_seed(0)
    parents = [-1, *(node if law is ProposalLaw.CHAIN else node // 2 for node in range(nodes - 1))]
    vocab_size = model.vocab_size
    logits = _LOGIT_SPREAD * torch.randn(batch * nodes, vocab_size, generator=generator)
    inner = sorted(set(parents) - {-1})
    rows = torch.tensor([row * nodes + node for row in range(batch) for node in inner])
    q = (logits[rows] + _DRAFT_NOISE * torch.randn(len(rows), vocab_size, generator=generator)).softmax(-1)
    if law is ProposalLaw.DETERMINISTIC:
        drawn = q.topk(2).indices
    else:
        drawn = torch.multinomial(q, 2, replacement=law is ProposalLaw.IID, generator=generator)
    line = {node: index for index, node in enumerate(inner)}
    rank = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    trees = [
        [
            (int(drawn[row * len(inner) + line[parents[node]], rank[node]]), parents[node])
            for node in range(1, nodes)
        ]
        for row in range(batch)
    ]
    fields: dict[str, Tensor] = {}
    if law.needs_q:
        q_row = torch.full((batch * nodes,), -1)
        q_row[rows] = torch.arange(len(rows))
        fields = {"q": q.to(model.device), "q_row": q_row.to(model.device)}
    roots = torch.zeros(batch, dtype=torch.int64, device=model.device)
    tree = TokenTree.from_lists(roots, trees, torch.full_like(roots, 100), law, **fields)
    return tree, logits.to(model.device, model.dtype)
