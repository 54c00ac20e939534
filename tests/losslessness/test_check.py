"""`check`: right combinations pass, wrong ones don't, and weak samples are not taken for proof."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.core import SamplingParams
from specdec.engine.config import SpeculativeConfig
from specdec.losslessness.batches import batch_check
from specdec.losslessness.check import CheckConfig, CheckReport, check
from specdec.losslessness.identity import greedy_check
from specdec.losslessness.report import check_json, check_table
from specdec.losslessness.result import CheckResult, Status, Verdict
from specdec.losslessness.sampled import Samples, law_check, make_case
from specdec.losslessness.streams import stream_check
from specdec.losslessness.subject import Subject
from specdec.losslessness.tiny import PROMPTS, tiny_draft
from specdec.models.target import TargetModel

# The samples are the limit, not the time: a busy machine changes nothing.
QUICK = CheckConfig(budget=1000.0, max_samples=256)
CHAIN = {"num_tokens": 3, "sample": True}
BROKEN = "specdec_tests.broken:"


def run(target: TargetModel, drafter: str, tree: str, verifier: str, **fields: Any) -> CheckReport:
    config = fields.pop("config", QUICK)
    sampling = SamplingParams(temperature=fields.pop("temperature", 1.0))
    speculative = SpeculativeConfig(drafter=drafter, tree=tree, verifier=verifier, **fields)
    return check(target, speculative, sampling, PROMPTS[:2], config)


@pytest.fixture(scope="module")
def report(target) -> CheckReport:
    """Of a combination that is exact."""
    return run(target, "early_exit", "chain", BROKEN + "ChainRule", tree_args=CHAIN)


def law_of(subject: Subject, first_seed: int = 0) -> CheckResult:
    cases = [make_case(subject.plain, "first", subject.prompts[0], subject.sampling)]
    samples = Samples(subject=subject, cases=cases, first_seed=first_seed)
    return law_check(samples, [512], threshold=1e-5, seconds=60)


def failed(report: CheckReport) -> set[str]:
    return {result.name for result in report.results if result.status.value == "FAIL"}


def test_an_exact_combination(report):
    assert report.verdict is Verdict.EXACT, report.reasons
    assert [result.name for result in report.results] == ["greedy", "coins", "company", "law", "controls"]
    company = next(result for result in report.results if result.name == "company")
    assert company.data["num_preemptions"] > 0


def test_siblings_drawn_with_replacement(target):
    tree_args = {"sizes": (2, 2), "draw": "with_replacement"}
    report = run(target, "early_exit", "expansion", "rrs", tree_args=tree_args)
    assert report.verdict is Verdict.EXACT, report.reasons
    controls = next(result for result in report.results if result.name == "controls")
    assert controls.statistic == "6 of 6 caught"


def test_a_rule_that_reproduces_plain_decoding(target):
    report = run(target, "ngram", "best_first", "target_only", tree_args={"num_nodes": 6})
    assert report.verdict is Verdict.EXACT, report.reasons
    same = next(result for result in report.results if result.name == "same tokens")
    assert same.statistic == "128 of 128 equal"


def test_a_second_model(target):
    config = CheckConfig(budget=1000.0, max_samples=1024)
    drafter_args = {"model": tiny_draft()}
    report = run(
        target, "small_lm", "chain", "token", config=config, drafter_args=drafter_args, tree_args=CHAIN
    )
    assert report.verdict is Verdict.EXACT, report.reasons
    assert 0.1 < report.combination["distance_p_q"] < 0.9


@pytest.mark.parametrize("rule", ["Swapped", "NotRenormalised", "ReusedCoin", "AskedTwice"])
def test_rules_with_another_law(subject, rule):
    own = subject("early_exit", "chain", BROKEN + rule, **CHAIN)
    assert law_of(own).status is Status.FAIL


def test_a_proposer_that_sorts_what_it_drew(subject):
    own = subject("early_exit", BROKEN + "SortedProposer", "rrsw", sizes=(3, 1), draw="without_replacement")
    assert law_of(own).status is Status.FAIL


def test_a_rule_that_asks_for_a_coin_twice(subject):
    own = subject("early_exit", "chain", BROKEN + "AskedTwice", **CHAIN)
    result = stream_check(own, 16, 6, threshold=1e-5)
    assert result.status is Status.FAIL
    assert "ACCEPT of seed" in result.detail


@pytest.mark.parametrize(("rule", "where"), [("RowCoins", "in a batch"), ("GlobalCoins", "differs at token")])
def test_rules_that_depend_on_company(subject, rule, where):
    own = subject("early_exit", "chain", BROKEN + rule, **CHAIN)
    assert law_of(own).status is Status.PASS
    result = batch_check(own, 2, 10)
    assert result.status is Status.FAIL
    assert where in result.detail


def test_a_broken_rule_is_not_exact(target):
    report = run(target, "early_exit", "chain", BROKEN + "ReusedCoin", tree_args=CHAIN)
    assert report.verdict is Verdict.NOT_EXACT
    assert failed(report) == {"law"}
    assert report.reasons[0].startswith("law: ")


def test_a_wrong_greedy_rule(subject):
    result = greedy_check(subject("early_exit", "chain", "specdec_tests.rules:Worst", num_tokens=3), 12)
    assert result.status is Status.FAIL
    assert "below the largest logit" in result.detail


def test_a_lossy_rule_is_measured_and_never_exact(target):
    report = run(target, "early_exit", "chain", "typical", tree_args={"num_tokens": 3})
    assert report.verdict is Verdict.NOT_EXACT
    assert report.reasons[0] == "the verifier declares itself lossy"
    law = next(result for result in report.results if result.name == "law")
    assert law.status.value == "lossy"
    assert law.data["distance"] > 2 * law.data["distance_by_chance"]


def test_too_few_samples_prove_nothing(target):
    report = run(
        target, "ngram", "chain", "token", config=CheckConfig(budget=1000.0, max_samples=64), tree_args=CHAIN
    )
    assert report.verdict is Verdict.UNDECIDED
    assert "missed" in report.reasons[0] or "no trace" in report.reasons[0]


def test_a_drafter_that_drafts_nothing_proves_nothing(target):
    report = run(target, "scripted", "chain", "target_only", drafter_args={"script": []})
    assert report.verdict is Verdict.UNDECIDED
    assert "no control changed a token" in report.reasons[0]


@pytest.mark.parametrize("verifier", ["greedy", "token"])
def test_temperature_0(target, verifier):
    report = run(target, "early_exit", "chain", verifier, temperature=0.0, tree_args={"num_tokens": 3})
    assert report.verdict is Verdict.EXACT, report.reasons


def test_other_seeds_give_no_false_alarm(subject):
    own = subject("early_exit", "chain", "token", **CHAIN)
    p_values = [law_of(own, first_seed=2**50 * seed).data["p_value"] for seed in range(1, 6)]
    assert min(p_values) > 1e-4
    assert max(p_values) > 0.05


def test_the_report(report, target):
    table = check_table(report).plain()
    assert table.startswith("tiny (float32) · early_exit × chain × specdec_tests.broken:ChainRule · chain")
    assert "verdict: exact" in table
    assert "at most 0.001 of all runs" in table
    data = json.loads(json.dumps(check_json(report, target), allow_nan=False))
    assert data["verdict"] == "exact"
    assert data["exit_code"] == 0
    assert data["combination"]["tree_args"] == {"num_tokens": 3, "sample": True}
    assert data["alpha"] / data["threshold"] >= len(
        next(c for c in data["checks"] if c["name"] == "law")["tests"]
    )
    law = next(c for c in data["checks"] if c["name"] == "law")
    assert {"first_seed", "num_samples", "distance", "cases", "tests"} <= law.keys()
    assert all(0 <= test["p_value"] <= 1 for test in law["tests"].values())
    controls = next(c for c in data["checks"] if c["name"] == "controls")["controls"]
    assert {control["outcome"] for control in controls} <= {"caught", "not applicable", "no effect"}
    assert {"versions", "git", "threads"} <= data["environment"].keys()


@pytest.mark.parametrize(
    "values", [{"budget": 0}, {"alpha": 1.5}, {"seed": -1}, {"max_samples": 1}], ids=lambda v: next(iter(v))
)
def test_configurations_that_make_no_sense(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        CheckConfig(**values)
