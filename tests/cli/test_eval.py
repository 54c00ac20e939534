"""`specdec eval`: single studies, sweeps, and their folders."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from specdec_tests.commands import STUDY

from specdec.cli import main
from specdec.cli.resolvers import folder_name, unique_name
from specdec.cli.sweep import job_names


def finished_runs(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.rglob("metrics.json"))


# One study


def test_a_study_prints_its_table_and_where_it_is(study, workspace, capsys):
    assert study("drafter=ngram") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "target (float32, cpu) · ngram × chain × token · 2 jsonl prompts · batch 1 · greedy"
    )
    for row in (
        "tokens/s",
        "speedup",
        "τ (tokens a step)",
        "survival@k",
        "TTFT p50 / p95",
        "2 of 2, ties 0, bugs 0",
    ):
        assert row in printed
    (run,) = (workspace / "outputs").iterdir()
    assert f"results: outputs/{run.name}" in printed
    assert (run / "metrics.json").is_file()
    assert (run / ".hydra" / "overrides.yaml").is_file()
    assert (run / "eval.log").is_file()


def test_sampling_options(study, workspace, capsys):
    options = (
        "presence_penalty=0.5",
        "min_tokens=4",
        "logit_bias={7:1.5}",
        "banned_token_ids=[8]",
        "logprobs=1",
    )
    assert study(*[f"sampling.{option}" for option in options], "eval.warmup_tokens=2") == 0
    assert "2 of 2, ties 0, bugs 0" in capsys.readouterr().out
    assert finished_runs(workspace)


def test_a_class_without_a_file(study, capsys):
    assert study("drafter=specdec_tests.rules:Renamed", "drafter.args.max_n=2", "tree=best_first") == 0
    assert "specdec_tests.rules:Renamed × best_first" in capsys.readouterr().out


def test_a_folder_is_resumed_and_never_overwritten(study, workspace, capsys):
    assert study("hydra.run.dir=mine") == 0
    before = (workspace / "mine" / "metrics.json").stat().st_mtime_ns
    assert study("hydra.run.dir=mine") == 0
    assert (workspace / "mine" / "metrics.json").stat().st_mtime_ns == before
    capsys.readouterr()
    assert study("hydra.run.dir=mine", "sampling.max_tokens=5") == 2
    assert "mine holds results of another configuration" in capsys.readouterr().err
    assert (workspace / "mine" / "metrics.json").stat().st_mtime_ns == before


def test_the_configuration_can_be_seen(study, capsys):
    assert study("drafter=early_exit", "--cfg", "job") == 0
    printed = capsys.readouterr().out
    assert "name: early_exit" in printed
    assert "path: prompts.jsonl" in printed


def test_help_lists_groups_and_choices(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["eval", "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "drafter: early_exit, ngram, none, quantised, quantised_coarse, scripted, self" in printed
    assert "specdec eval drafter=ngram,early_exit tree=chain,best_first -m" in printed


def test_configuration_files_of_the_user(study, workspace, capsys):
    (workspace / "mine" / "experiment").mkdir(parents=True)
    (workspace / "mine" / "experiment" / "short.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /drafter: none\n"
    )
    assert study("--config-dir", "mine", "experiment=short") == 0
    assert "plain decoding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["sampling.temprature=1"],
            "unknown configuration key 'sampling.temprature' (did you mean 'temperature'?)",
        ),
        (["smapling.seed=1"], "unknown configuration key 'smapling' (did you mean 'sampling'?)"),
        (["drafter=ngrm"], "unknown drafter 'ngrm'"),
        (["target=nowhere/at/all"], "model 'nowhere/at/all' is no local folder, GGUF file or hub id"),
        (["tree=chain_sampled", "verifier=greedy", "sampling=temperature"], "temperature=1.0"),
        (["drafter.args.max_m=2"], "drafter 'ngram'"),
        (["drafter=ngram,none"], "Ambiguous value"),
        (["data.path=missing.jsonl"], "missing.jsonl"),
        (["--frobnicate"], None),
    ],
)
def test_wrong_input_is_one_line_and_code_2(study, workspace, capsys, arguments, message):
    if message is None:
        with pytest.raises(SystemExit) as stop:
            study(*arguments)
        assert stop.value.code == 2
        return
    assert study(*arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert finished_runs(workspace) == []


def test_an_illegal_pair_names_the_legal_ones(study, capsys):
    class_path = "specdec_tests.rules:DrawsOnly"
    assert study(f"verifier={class_path}") == 2
    assert "use verifier: greedy, gumbel, target_only, token" in capsys.readouterr().err


def test_the_traceback_is_there_for_those_who_ask(study, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="missing.jsonl"):
        study("data.path=missing.jsonl")


# Sweeps


def test_a_sweep_has_a_folder_a_job_and_a_summary(study, workspace, capsys):
    assert study("drafter=ngram,early_exit", "tree=chain,best_first", "-m", "hydra.sweep.dir=sweep") == 0
    names = finished_runs(workspace / "sweep")
    with (workspace / "sweep" / "sweep.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["drafter"], row["tree"]) for row in rows] == [
        (drafter, tree) for drafter in ("early_exit", "ngram") for tree in ("best_first", "chain")
    ]
    assert all(1 <= float(row["tau_low"]) <= float(row["tau"]) <= float(row["tau_high"]) for row in rows)
    assert (workspace / "sweep" / "sweep.png").stat().st_size > 1000
    assert len(names) == 4
    assert any("drafter=early_exit" in name and "tree=best_first" in name for name in names)
    summary = capsys.readouterr().out.partition("4 jobs")[2]
    for drafter in ("ngram", "early_exit"):
        for tree in ("chain", "best_first"):
            assert f"drafter={drafter} tree={tree}" in summary


def test_a_failing_job_leaves_the_others_alone(study, workspace, capsys):
    arguments = ["drafter=ngram,specdec_tests.rules:Broken,early_exit", "-m", "hydra.sweep.dir=sweep"]
    assert study(*arguments) == 1
    captured = capsys.readouterr()
    assert len(finished_runs(workspace / "sweep")) == 2
    assert "failed: drafter=specdec_tests.rules_Broken: broken on purpose" in captured.err
    (failure,) = (workspace / "sweep").glob("*/failure.json")
    assert "broken on purpose" in json.loads(failure.read_text())["error"]
    assert "broken on purpose" in (failure.parent / "eval.log").read_text()


def test_a_sweep_is_resumed(study, workspace, capsys):
    arguments = ["tree.args.num_tokens=1,2", "-m", "hydra.sweep.dir=sweep"]
    assert study(*arguments) == 0
    before = {path: path.stat().st_mtime_ns for path in workspace.rglob("metrics.json")}
    first, _ = before
    first.unlink()
    assert study(*arguments) == 0
    after = {path: path.stat().st_mtime_ns for path in workspace.rglob("metrics.json")}
    assert set(after) == set(before)
    assert [path for path in after if after[path] == before[path]] == [
        path for path in before if path != first
    ]


def test_a_preset_that_sweeps(study, workspace, capsys):
    assert study("experiment=ngram_vs_early_exit", "hydra.sweep.dir=sweep") == 0
    assert len(finished_runs(workspace / "sweep")) == 4


# Folder names


def test_processes_of_the_same_second_have_their_own_folders(workspace):
    command = [sys.executable, "-m", "specdec", "eval", *STUDY, "drafter=none"]
    running = [
        subprocess.Popen(command, cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    assert len(finished_runs(workspace / "outputs")) == 2


def test_the_name_of_a_run_does_not_rest_on_the_clock():
    assert len({unique_name() for _ in range(50)}) == 50


def test_a_claimed_folder_is_refused(study, workspace, capsys):
    from specdec.evaluation.folder import claimed

    with claimed(workspace / "mine"):
        assert study("hydra.run.dir=mine") == 2
    assert "mine is in use by another run" in capsys.readouterr().err


def test_overrides_become_one_folder():
    assert (
        folder_name(["data.limit=2", "tree=chain", "++drafter=ngram"])
        == "drafter=ngram,tree=chain,data.limit=2"
    )
    assert "/" not in folder_name(["target=/a/b c", "tree.max_nodes_by_batch={8:1}"])
    long = [f"key{index}=value" for index in range(40)]
    assert len(folder_name(long)) < 200
    assert folder_name(long) != folder_name([*long[:-1], "key39=other"])
    assert folder_name([]) == "default"


def test_jobs_are_named_by_what_differs():
    assert job_names([["a=1", "b=1"], ["a=1", "b=2"]]) == ["b=1", "b=2"]
    assert job_names([["a=1"]]) == ["a=1"]
    assert job_names([["a=1"], []]) == ["a=1", "(defaults)"]
