"""The target's law: products of conditionals, cells that partition, samples of plain decoding that follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.core import SamplingBatch, SamplingParams
from specdec.core.sampling import warp
from specdec.evaluation.equality import next_logits
from specdec.losslessness.law import REST, target_law
from specdec.losslessness.serving import decode, seeded, tokens_of
from specdec.losslessness.tiny import PROMPTS, VOCAB_SIZE

WARPS = {
    "temperature": SamplingParams(temperature=0.9),
    "filters": SamplingParams(top_k=6, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
    "greedy": SamplingParams(temperature=0),
}


def warped(plain, tokens, params):
    sampling = SamplingBatch([params], torch.device("cpu"))
    return warp(next_logits(plain, tokens).unsqueeze(0), sampling, torch.zeros(1, dtype=torch.int64))[0]


@pytest.mark.parametrize("name", ["temperature", "filters", "greedy"])
def test_masses_are_products_of_conditionals(plain, name):
    law = target_law(plain, PROMPTS[1], WARPS[name], length=3)
    prefix = max((prefix for prefix in law.mass if len(prefix) == 3), key=law.mass.__getitem__)
    expected = 1.0
    for end in range(3):
        expected *= float(warped(plain, [*PROMPTS[1], *prefix[:end]], WARPS[name])[prefix[end]])
    assert law.mass[prefix] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", WARPS)
def test_cells_are_a_partition(plain, name, length):
    law = target_law(plain, PROMPTS[0], WARPS[name], length=3, max_prefixes=20)
    cells = law.cells(length)
    assert sum(cells.values()) == pytest.approx(1, abs=1e-9)
    generator = torch.Generator().manual_seed(0)
    for tokens in torch.randint(VOCAB_SIZE, (300, 3), generator=generator).tolist():
        assert law.cell(tuple(tokens), length) in cells
    for prefix in law.mass:
        if len(prefix) == length:
            assert law.cell(prefix, length) == prefix or law.cell(prefix, length) in cells


def test_where_nothing_is_worth_counting_there_is_one_cell(plain):
    law = target_law(plain, PROMPTS[0], SamplingParams(temperature=5.0), length=3, min_mass=0.9)
    assert law.cells(3) == {(REST,): pytest.approx(1)}
    assert law.test([(1, 2, 3), (4, 5, 6)], 3).p_value == 1


def test_tokens_that_are_filtered_out_have_no_mass(plain):
    law = target_law(plain, PROMPTS[0], SamplingParams(top_k=2), length=2)
    assert law.cells(2)[(REST,)] == 0
    assert law.test([(0, 0)] * 10, 2).p_value == 0


@pytest.mark.parametrize("name", WARPS)
def test_plain_decoding_follows_it(plain, name):
    params = WARPS[name]
    law = target_law(plain, PROMPTS[0], params, length=3)
    own = seeded(params, range(1024), max_tokens=3)
    samples = tokens_of(decode(plain, [PROMPTS[0]] * len(own), own, wave=512))
    assert min(law.test(samples, length).p_value for length in (1, 2, 3)) > 1e-4
    if name != "greedy":
        other = target_law(plain, PROMPTS[0], replace(params, temperature=1.6), length=3)
        assert other.test(samples, 3).p_value < 1e-6
