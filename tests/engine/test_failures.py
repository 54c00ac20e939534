"""One bad request fails alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from specdec_tests.models import GREEDY, tiny_lm
from specdec_tests.scripts import mixed_tree
from specdec_tests.serving import complete, make_engine, scripted, speculate, tokens_of
from torch import Tensor

from specdec.core import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.request import FinishReason, Request

LM = tiny_lm()
DRAFT = tiny_lm(seed=1)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
SAMPLED = {"num_tokens": 4, "sample": True}
SPECULATIONS = {
    "plain": None,
    "tree": scripted(mixed_tree(LM, 10), "token", max_nodes=10),
    "self": speculate("self", verifier="token", tree_args=SAMPLED),
    "small_lm": speculate("small_lm", "best_first", drafter_args={"model": DRAFT.target}),
}


def spoil_target(engine: Engine, value: float, wanted: Callable[[Request], bool]) -> None:
    """Replaces the target's logits of some requests' nodes."""
    run, step = engine.target.node_logits, engine.step_runner
    current: list[Sequence[Request]] = []
    original = step.run

    def remember(requests: Sequence[Request], block_tables: Tensor):
        current[:] = [requests]
        return original(requests, block_tables)

    def spoiled(batch, *, num_layers: int | None = None) -> Tensor:
        logits = run(batch, num_layers=num_layers)
        if num_layers is None:
            starts = batch.meta.host.query_offsets
            prefill = batch.meta.host.num_prefill
            first = 0
            for row, request in enumerate(current[0]):
                count = starts[row + 1] - starts[row] - prefill[row]
                if wanted(request):
                    logits[first : first + count] = value
                first += count
        return logits

    step.run = remember
    engine.target.node_logits = spoiled


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("when", ["prefill", "later"])
@pytest.mark.parametrize("name", SPECULATIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_nothing_can_be_drawn_from(name, when, value, temperature):
    params = [SamplingParams(temperature=temperature, seed=row, max_tokens=20) for row in range(3)]
    expected = tokens_of(make_engine(LM.target, SPECULATIONS[name]), PROMPTS, params)
    engine = make_engine(LM.target, SPECULATIONS[name])
    least = 0 if when == "prefill" else 5
    spoil_target(
        engine, value, lambda request: request.request_id == 1 and request.num_output_tokens >= least
    )
    requests = complete(engine, PROMPTS, params)
    for row in (0, 2):
        assert requests[row].output_token_ids == expected[row]
        assert requests[row].error is None
    assert requests[1].finish_reason is FinishReason.ERROR
    assert "NaN or no finite value" in requests[1].error
    kept = requests[1].output_token_ids
    assert kept == expected[1][: len(kept)]
    assert len(kept) >= least


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize(
    ("tree", "arguments"),
    [("chain", {"num_tokens": 4}), ("chain", SAMPLED), ("static", {}), ("best_first", {})],
    ids=["argmax", "sampled", "static", "best_first"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_without_usable_logits_costs_only_acceptance(tree, arguments, value, temperature):
    """A drafter must never end a request, and least of all its neighbours'."""
    config = speculate("small_lm", tree, "token", drafter_args={"model": DRAFT.target}, tree_args=arguments)
    engine = make_engine(LM.target, config)
    model = engine.speculation.drafter.model
    expand = model.expand

    def spoiled(frontier) -> Tensor:
        logits = expand(frontier).clone()
        rows = torch.tensor([frontier.batch.request_ids[row] == 1 for row in frontier.rows])
        return logits.masked_fill(rows.unsqueeze(1), value)

    model.expand = spoiled
    greedy, own = (SamplingParams(temperature=heat, seed=1, max_tokens=20) for heat in (0.0, temperature))
    requests = complete(engine, PROMPTS, [greedy, own, greedy])
    for row in range(3) if temperature == 0 else (0, 2):
        assert requests[row].output_token_ids == LM.greedy(PROMPTS[row], 20)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)


def test_stale_nan_in_reused_pages_is_never_read():
    """A failed request leaves NaN in its pages; the next owner must not see it."""
    engine = make_engine(LM.target, speculate("self"), num_blocks=20)
    for _ in range(3):
        engine.target.kv.fill_(float("nan"))
        (request,) = complete(engine, [PROMPTS[0]], GREEDY)
        assert request.output_token_ids == LM.greedy(PROMPTS[0], 40)
