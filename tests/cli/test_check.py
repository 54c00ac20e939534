"""`specdec check`: exit codes, tables, reports, and the targets it takes."""

import json

import pytest

from specdec.cli import main

TINY = ["check", "target=tiny", "drafter=early_exit", "--budget", "1"]


def test_exact_is_0_and_the_report_is_written(workspace, capsys):
    arguments = ["tree=best_first", "verifier=target_only", "tree.args.num_nodes=5", "--json", "report.json"]
    assert main([*TINY, *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("tiny (float32) · early_exit × best_first × target_only · deterministic · temp")
    assert "verdict: exact" in printed
    report = json.loads((workspace / "report.json").read_text())
    assert report["verdict"] == "exact"
    assert report["combination"]["tree_args"]["num_nodes"] == 5


def test_not_exact_is_1(workspace, capsys):
    assert main([*TINY, "tree=chain_sampled", "verifier=specdec_tests.rules:Worst"]) == 1
    printed = capsys.readouterr().out
    assert "verdict: NOT EXACT" in printed
    assert "greedy: " in printed


def test_lossy_is_1(workspace, capsys):
    assert main([*TINY, "verifier=typical"]) == 1
    assert "the verifier declares itself lossy" in capsys.readouterr().out


def test_too_little_power_is_3(workspace, capsys):
    drafter = ["drafter=scripted", "drafter.args.script=[]", "verifier=target_only"]
    assert main(["check", "target=tiny", *drafter, "--budget", "1"]) == 3
    assert "undecided: too little power" in capsys.readouterr().out


def test_a_target_in_a_folder_and_prompts_in_a_file(workspace, capsys):
    arguments = ["target=target", "data=jsonl", "data.path=prompts.jsonl", "data.limit=1", "drafter=ngram"]
    greedy = ["sampling=greedy", "verifier=greedy"]
    assert main(["check", *arguments, *greedy, "--budget", "1"]) == 0
    assert capsys.readouterr().out.startswith(
        "target (float32) · ngram × chain × greedy · deterministic · greedy"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafter=none"], "there is nothing to check"),
        (["tree=chain_sampled", "verifier=rrs:NoSuch"], "cannot be imported"),
        (["sampling.temprature=1"], "did you mean 'temperature'"),
        (["--budget", "0"], "budget=0.0"),
        (["tree=ddtree"], "needs a drafter's marginals"),
    ],
)
def test_wrong_usage_is_2(workspace, capsys, arguments, message):
    assert main([*TINY, *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_all_takes_no_combination(workspace, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["check", "--all", "drafter=ngram"])
    assert stop.value.code == 2
    assert "leave out drafter=ngram" in capsys.readouterr().err
