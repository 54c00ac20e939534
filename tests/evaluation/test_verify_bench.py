"""The cost of verification: every rule is timed, memory is counted right and grows no faster than the tree."""

from __future__ import annotations

import pytest
import torch
from specdec_tests.models import tiny_lm

from specdec.core import SamplingParams
from specdec.evaluation.memory import peak_bytes
from specdec.evaluation.verify_bench import verification_cases
from specdec.verifiers.base import ALL_LAWS
from specdec.verifiers.registry import VERIFIERS


def test_peak_counts_what_lives_together():
    def run() -> None:
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b.view(10, 100) * 2
        c.add_(1)

    assert peak_bytes(run) == 8000


def test_peak_does_not_count_what_was_there_before():
    x = torch.ones(1000)
    assert peak_bytes(lambda: x.mul_(2)) == 0
    assert peak_bytes(lambda: x[:10].clone()) == 40


@torch.inference_mode()
def test_every_rule_is_timed_under_every_law_it_is_made_for():
    cases = verification_cases(tiny_lm().target, 2, 8, SamplingParams())
    pairs = {(case.name, case.law) for case in cases}
    for name in VERIFIERS.names():
        laws = VERIFIERS.get(name).laws
        assert laws == ALL_LAWS or {(name, law) for law in laws} <= pairs
    for case in cases:
        assert case.run() > 0
        assert 0 <= case.num_accepted <= 2 * 7


@torch.inference_mode()
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)], ids=str)
def test_memory_grows_no_faster_than_the_tree(params):
    target = tiny_lm(vocab_size=2000).target
    small, large = (verification_cases(target, 2, nodes, params) for nodes in (16, 64))
    for before, after in zip(small, large, strict=True):
        assert peak_bytes(after.run) < 5 * max(peak_bytes(before.run), 10_000), after.name
