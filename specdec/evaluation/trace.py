"""Traces: what was drafted and accepted, node by node, and what each step cost.

`trace.parquet` has one row a node of the speculative variant, roots included:

    request, step, node, parent, depth, token      parent is -1 for a root; `step` as in steps.parquet
    p         the target's probability of the token after its parent; null for a root
    q         the drafter's, exp(score[node] - score[parent]); null where the drafter keeps no score
    entropy   nats, of the target's distribution after the parent; null for a root
    accepted  roots count as accepted

p is the softmax without temperature and filters under greedy decoding, and the warped distribution under sampling.
`steps.parquet` has one row a step of either variant, with the seconds of its phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from specdec.engine.step import StepResult
from specdec.evaluation.variant import Variant

_NODE_SCHEMA = pa.schema(
    [
        ("request", pa.string()),
        ("step", pa.int32()),
        ("node", pa.int32()),
        ("parent", pa.int32()),
        ("depth", pa.int32()),
        ("token", pa.int32()),
        ("p", pa.float32()),
        ("q", pa.float32()),
        ("entropy", pa.float32()),
        ("accepted", pa.bool_()),
    ]
)
_STEP_COLUMNS = ("step", "num_requests", "num_nodes", "num_emitted", "has_prefill")


class TraceWriter:
    """Observes a variant's engine and writes its nodes; a context manager.

    Args:
        path: of the Parquet file.
        variant: whose steps are traced. Create the writer after the warm-up.
    """

    def __init__(self, path: Path, variant: Variant) -> None:
        self.variant = variant
        self._writer = pq.ParquetWriter(path, _NODE_SCHEMA)
        self._columns: dict[str, list[Any]] = {name: [] for name in _NODE_SCHEMA.names}

    def __enter__(self) -> TraceWriter:
        self.variant.engine.observers.append(self._observe)
        return self

    def __exit__(self, *_exception: object) -> None:
        self.variant.engine.observers.remove(self._observe)
        self.flush()
        self._writer.close()

    def flush(self) -> None:
        """Writes the rows gathered so far."""
        if self._columns["step"]:
            self._writer.write_table(pa.table(self._columns, schema=_NODE_SCHEMA))
            self._columns = {name: [] for name in _NODE_SCHEMA.names}

    @torch.inference_mode()
    def _observe(self, result: StepResult, _num_kept: Sequence[int]) -> None:
        tree = result.tree
        requests = [self.variant.prompt_of(request.request_id).id for request in result.requests]
        accepted = [False] * len(tree.tokens)
        for start, path in zip(tree.host_offsets, result.paths, strict=False):
            for node in (0, *path):
                accepted[start + node] = True
        p, entropy = _target_columns(result)
        rows: dict[str, list[Any]] = {
            "request": [requests[row] for row in tree.request_of_node.tolist()],
            "step": [self.variant.current_step] * len(accepted),
            "node": tree.index_in_request.tolist(),
            "parent": tree.parents.tolist(),
            "depth": tree.depth.tolist(),
            "token": tree.tokens.tolist(),
            "p": p,
            "q": _draft_column(result),
            "entropy": entropy,
            "accepted": accepted,
        }
        for name, values in rows.items():
            self._columns[name] += values


def write_steps(path: Path, variants: Sequence[Variant]) -> None:
    """Writes `steps.parquet`."""
    rows = [
        {
            "variant": variant.name,
            "batch": index,
            **{name: getattr(step, name) for name in _STEP_COLUMNS},
            **asdict(step.times),
        }
        for variant in variants
        for index, batch in enumerate(variant.batches)
        for step in batch.steps
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def _target_columns(result: StepResult) -> tuple[list[float | None], list[float | None]]:
    """p of each node's token, and the entropy it was drawn under."""
    tree = result.tree
    drafted = (tree.parents >= 0).nonzero().squeeze(1)  # [n]
    if not len(drafted):
        return [None] * len(tree.tokens), [None] * len(tree.tokens)
    parents, row_of = tree.flat_parents[drafted].unique(return_inverse=True)
    if result.p.all_greedy:
        distributions = result.p.changed_logits[parents].float().softmax(-1)  # [m, V]
    else:
        distributions = result.p.rows(parents)
    entropy = torch.special.entr(distributions).sum(-1)[row_of]
    return _spread(tree.parents, distributions[row_of, tree.tokens[drafted]]), _spread(tree.parents, entropy)


def _draft_column(result: StepResult) -> list[float | None]:
    tree = result.tree
    if tree.score is None:
        return [None] * len(tree.tokens)
    drafted = (tree.parents >= 0).nonzero().squeeze(1)
    return _spread(tree.parents, (tree.score[drafted] - tree.score[tree.flat_parents[drafted]]).exp())


def _spread(parents: Tensor, values: Tensor) -> list[float | None]:
    """Values of the drafted nodes, with None for the roots in between."""
    remaining = iter(values.tolist())
    return [next(remaining) if parent >= 0 else None for parent in parents.tolist()]
