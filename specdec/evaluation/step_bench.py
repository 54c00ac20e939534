"""How long a step takes beside the weight-streaming linears it cannot do without.

All rows are measured in turn, round after round, so that a drifting machine touches them alike; ratios are to the
linears at one row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from specdec.core import SamplingParams
from specdec.engine.config import EngineConfig, SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.engine.metrics import StepTimes
from specdec.evaluation.table import TextTable
from specdec.kernels.backend import describe_backend
from specdec.models import TargetModel, load_target, sources

Result = dict[str, Any]

# Drafted tokens of the rows that verify 8 and 16 nodes: the root is a node, too.
_VERIFIED = {"verify 8 nodes": 7, "verify 16 nodes": 15}


def bench_step(
    target: str, *, dtype: str | None, context: int, repeats: int, compare: str | None = None
) -> Result:
    """Times linears alone, plain steps, tree verification and batches of 8.

    Args:
        target: name of a target.
        dtype: weights; None chooses.
        context: tokens before the first timed step.
        repeats: measurements of each row.
        compare: "transformers" also times a plain transformers step.

    Returns:
        Medians in milliseconds and ratios, one entry a row, with the conditions.
    """
    model = load_target(target, dtype=dtype)
    measured: dict[str, Callable[[], float]] = {}
    for rows in (1, 8, 16):
        measured[f"linears, {rows} row{'s' if rows > 1 else ''}"] = _linears(model, rows)
    lanes = {"plain step, batch 1": Lane(model, 1, context, repeats)}
    for name, drafted in _VERIFIED.items():
        lanes[f"{name}, batch 1"] = Lane(model, 1, context, repeats, drafted)
    lanes["plain step, batch 8"] = Lane(model, 8, context, repeats)
    lanes["verify 4 nodes, batch 8"] = Lane(model, 8, context, repeats, 3)
    measured |= {name: lane.step for name, lane in lanes.items()}
    if compare == "transformers":
        measured["transformers step, batch 1"] = _transformers_step(target, model.dtype, context)
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for round_number in range(repeats + 1):
        for name, measure in measured.items():
            elapsed = measure()
            # The first round warms up.
            if round_number:
                seconds[name].append(elapsed)
    base = statistics.median(seconds["linears, 1 row"])
    rows_out = []
    for name, values in seconds.items():
        median = statistics.median(values)
        share = lanes[name].bookkeeping_share() if name in lanes else None
        rows_out.append({"name": name, "ms": 1e3 * median, "ratio": median / base, "bookkeeping": share})
    return {
        "target": target,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": context,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "kernels": describe_backend(),
        "rows": rows_out,
    }


def step_table(result: Result) -> TextTable:
    """The rows of `bench_step`."""
    rows = [
        [
            row["name"],
            f"{row['ms']:.2f}",
            f"{row['ratio']:.2f}×",
            "" if row["bookkeeping"] is None else f"{row['bookkeeping']:.1%}",
        ]
        for row in result["rows"]
    ]
    return TextTable(
        title=f"{result['target']} ({result['dtype']}), {result['context']} tokens of context, "
        f"{result['threads']} threads, kernels: {result['kernels']}",
        columns=["", "median ms", "to linears", "bookkeeping"],
        rows=rows,
        notes=[f"Medians of {result['repeats']} interleaved measurements; ratios to the linears at one row."],
    )


class Lane:
    """An engine that decodes random prompts, one step a measurement."""

    def __init__(
        self, model: TargetModel, batch: int, context: int, repeats: int, num_drafted: int = 0
    ) -> None:
        speculative = None
        if num_drafted:
            # Token 0 again and again: nothing is accepted, so that every step verifies the same number of nodes.
            arguments = {"script": [0] * num_drafted, "max_nodes": num_drafted}
            speculative = SpeculativeConfig(drafter="scripted", drafter_args=arguments)
        room = context + 16 * (repeats + 4) + num_drafted
        self.engine = Engine(model, EngineConfig(num_kv_tokens=batch * room, max_num_seqs=batch), speculative)
        self.times: list[StepTimes] = []
        generator = torch.Generator().manual_seed(0)
        for _ in range(batch):
            prompt = torch.randint(1, model.vocab_size, (context,), generator=generator).tolist()
            params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            self.engine.add_request(prompt, params)
        self.engine.step()
        self.engine.observers.append(lambda result, kept: self.times.append(result.times))

    def step(self) -> float:
        self.engine.step()
        return self.times[-1].total

    def bookkeeping_share(self) -> float:
        """Median over steps of everything but models and sampling mathematics."""
        return statistics.median(times.bookkeeping / times.total for times in self.times[1:])


def _linears(model: TargetModel, rows: int) -> Callable[[], float]:
    """The weight matrices of a forward in order, each multiplied with `rows` rows."""
    weights = _weight_matrices(model)
    inputs = {width: torch.randn(rows, width).to(model.dtype) for width in {w.shape[1] for w in weights}}

    @torch.inference_mode()
    def measure() -> float:
        start = time.perf_counter()
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)
        return time.perf_counter() - start

    return measure


def _weight_matrices(model: TargetModel) -> list[Tensor]:
    """Weights in the order a forward uses them; matrices that lie in one fused storage count as one."""
    found: list[Tensor] = []
    for module in model.model.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        weight = module.weight.detach()
        previous = found[-1] if found else None
        if previous is not None and _continues(previous, weight):
            rows = previous.shape[0] + weight.shape[0]
            found[-1] = previous.as_strided(
                (rows, weight.shape[1]), weight.stride(), previous.storage_offset()
            )
        else:
            found.append(weight)
    return found


def _continues(first: Tensor, second: Tensor) -> bool:
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and first.storage_offset() + first.numel() == second.storage_offset()


def _transformers_step(target: str, dtype: torch.dtype, context: int) -> Callable[[], float]:
    """One-token steps of the unmodified model with its own cache."""
    model = AutoModelForCausalLM.from_pretrained(sources.resolve(target), dtype=dtype).eval()
    cache = DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, model.config.vocab_size, (1, context), generator=generator)
    with torch.inference_mode():
        model(input_ids=prompt, cache=cache, use_cache=True)

    @torch.inference_mode()
    def measure() -> float:
        start = time.perf_counter()
        model(input_ids=prompt[:, -1:], cache=cache, use_cache=True).logits[0, -1].argmax().item()
        return time.perf_counter() - start

    return measure
