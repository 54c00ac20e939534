"""`check_all`: which combinations there are, and what a run over some of them says."""

from __future__ import annotations

import json

import pytest

from specdec.drafters.registry import DRAFTERS, TREES
from specdec.losslessness.check import CheckConfig
from specdec.losslessness.matrix import MatrixReport, check_all
from specdec.losslessness.members import members
from specdec.losslessness.power import Outcome
from specdec.losslessness.report import matrix_json, matrix_table
from specdec.losslessness.result import Verdict
from specdec.verifiers.registry import VERIFIERS

CONFIG = CheckConfig(budget=10.0)
CHOSEN = {"early_exit × chain sample × token", "ngram × best_first × greedy", "early_exit × chain × typical"}


@pytest.fixture(scope="module")
def report() -> MatrixReport:
    return check_all(CONFIG, only=lambda member: member.name in CHOSEN)


def test_everything_that_is_registered_is_covered():
    skipped: list[str] = []
    found = list(members(skipped))
    assert skipped == []
    assert {member.config.drafter for member in found} == set(DRAFTERS.names())
    assert {member.config.tree for member in found if member.tree} == set(TREES.names())
    assert {(member.config.verifier, member.law) for member in found} == {
        (name, law) for name in VERIFIERS.names() for law in VERIFIERS.get(name).laws
    }
    assert len({member.name for member in found}) == len(found)


def test_some_of_them(report):
    assert report.verdict is Verdict.EXACT, report.reasons
    assert report.num_members == 3
    rows = {cell.verifier: cell for cell in report.cells}
    assert {own.outcome for own in rows["token"].controls} == {Outcome.CAUGHT, Outcome.NOT_APPLICABLE}
    assert rows["typical"].lossy
    assert rows["typical"].controls == []


def test_the_table_and_the_json(report):
    table = matrix_table(report).plain()
    lines = [line.split()[:2] for line in table.splitlines()]
    assert lines.index(["token", "chain"]) < lines.index(["typical", "deterministic"])
    assert "verdict: exact" in table
    assert "lossy, distance" in table
    data = json.loads(json.dumps(matrix_json(report), allow_nan=False))
    assert data["exit_code"] == 0
    (token,) = [cell for cell in data["cells"] if cell["verifier"] == "token"]
    assert set(token["pooled_p_values"]) == {"2", "3", "4"}
    assert token["combinations"][0]["name"] == "early_exit × chain sample × token"
    assert {check["name"] for check in token["combinations"][0]["checks"]} >= {"greedy", "coins", "law"}


def test_a_broken_plug_in_is_found_and_one_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(VERIFIERS._targets, "mine", "specdec_tests.broken:ReusedCoin")
    monkeypatch.setitem(TREES._targets, "lost", "no.such.module:Class")
    report = check_all(CONFIG, only=lambda member: member.name == "early_exit × chain sample × mine")
    assert report.verdict is Verdict.NOT_EXACT
    assert report.reasons[0].startswith("early_exit × chain sample × mine: law: ")
    assert any("tree=lost" in reason for reason in report.skipped)
    assert "1 FAIL" in matrix_table(report).plain()
