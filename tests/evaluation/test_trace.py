"""The trace says what the engine did."""

import json
from collections import defaultdict

import pyarrow.parquet as pq
import pytest
import torch
from specdec_tests.folders import PROMPTS, byte_tokenizer, make_study
from specdec_tests.models import tiny_lm

from specdec.core import SamplingParams
from specdec.engine.config import SpeculativeConfig
from specdec.evaluation.study import run_study


@pytest.fixture(scope="module")
def lm():
    return tiny_lm(vocab_size=len(byte_tokenizer()))


def trees_of(folder):
    """Rows by step, in node order."""
    trees = defaultdict(list)
    for row in pq.read_table(folder / "trace.parquet").to_pylist():
        trees[row["request"], row["step"]].append(row)
    return trees


def path_to(rows, node):
    """Drafted tokens from the root to a node."""
    path = []
    while node:
        path.append(rows[node]["token"])
        node = rows[node]["parent"]
    return path[::-1]


def test_nodes_add_up_to_the_counts(finished):
    rows = pq.read_table(finished.folder / "trace.parquet").to_pylist()
    acceptance = finished.metrics["speculative"]["acceptance"]
    drafted = [row for row in rows if row["parent"] >= 0]
    assert len(drafted) == acceptance["num_drafted"]
    assert sum(row["accepted"] for row in drafted) >= acceptance["num_accepted"]
    steps = pq.read_table(finished.folder / "steps.parquet").to_pylist()
    nodes = {step["step"]: step["num_nodes"] for step in steps if step["variant"] == "speculative"}
    assert len(rows) == sum(nodes.values())


def test_trees_are_trees(finished):
    for rows in trees_of(finished.folder).values():
        root = rows[0]
        assert (root["node"], root["parent"], root["depth"], root["accepted"]) == (0, -1, 0, True)
        assert root["p"] is root["q"] is root["entropy"] is None
        for node, row in enumerate(rows[1:], start=1):
            assert row["node"] == node
            parent = rows[row["parent"]]
            assert row["depth"] == parent["depth"] + 1
            assert not row["accepted"] or parent["accepted"]
            assert 0 <= row["p"] <= 1
            assert 0 < row["q"] <= 1
            assert row["entropy"] >= 0


def test_p_and_entropy_are_the_models(finished, lm):
    tokenizer = byte_tokenizer()
    lines = (finished.folder / "requests.jsonl").read_text().splitlines()
    outputs = [json.loads(line)["speculative"]["token_ids"] for line in lines]
    texts = {
        f"p{index}": tokenizer(prompt)["input_ids"] + output
        for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True))
    }
    committed = {f"p{index}": len(tokenizer(prompt)["input_ids"]) for index, prompt in enumerate(PROMPTS)}
    checked = 0
    for (request, _), rows in trees_of(finished.folder).items():
        prefix = texts[request][: committed[request]]
        assert rows[0]["token"] == prefix[-1]
        for row in rows[1:]:
            expected = lm.logits([*prefix, *path_to(rows, row["parent"])])[-1].softmax(-1)
            assert row["p"] == pytest.approx(float(expected[row["token"]]), abs=1e-4)
            assert row["entropy"] == pytest.approx(float(torch.special.entr(expected).sum()), abs=1e-3)
            checked += 1
        # The root was committed before the step, and stands for the token that it adds.
        committed[request] += sum(row["accepted"] for row in rows)
    assert checked == finished.metrics["speculative"]["acceptance"]["num_drafted"]


def test_sampled_p_is_warped(workspace, tmp_path):
    sampling = SamplingParams(temperature=1.0, top_k=1, max_tokens=8, seed=0)
    config = make_study(workspace, SpeculativeConfig(drafter="ngram"), sampling=sampling)
    run_study(config, tmp_path)
    drafted = [row for rows in trees_of(tmp_path).values() for row in rows[1:]]
    assert {row["p"] for row in drafted} <= {0.0, 1.0}
    assert {row["entropy"] for row in drafted} == {0.0}


def test_a_drafter_without_scores_has_no_q(workspace, tmp_path):
    scripted = SpeculativeConfig(drafter="scripted", drafter_args={"script": [1, 2]})
    run_study(make_study(workspace, scripted), tmp_path)
    drafted = [row for rows in trees_of(tmp_path).values() for row in rows[1:]]
    assert {row["q"] for row in drafted} == {None}
