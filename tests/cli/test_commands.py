"""`specdec ls`, `specdec generate` and `specdec bench step`."""

import io
import json

import pytest
from specdec_tests.commands import STUDY

from specdec.cli import main
from specdec.drafters.registry import DRAFTERS, TREES
from specdec.verifiers.registry import VERIFIERS

# `generate` takes the settings of `eval` that decide how a text is completed.
SETTINGS = [item for item in STUDY if not item.startswith(("data", "logger", "eval"))]


# ls


def test_ls_names_everything_and_its_laws(capsys):
    assert main(["ls"]) == 0
    printed = capsys.readouterr().out
    for registry in (DRAFTERS, TREES, VERIFIERS):
        for name in registry.names():
            assert f"\n{name} " in printed
            assert registry.describe(name) in printed
    for text in (
        "deterministic",
        "chain, deterministic",
        "temperature 0",
        "smollm2-135m",
        "ngram_vs_early_exit",
    ):
        assert text in printed


def test_ls_shows_plug_ins(capsys, monkeypatch):
    monkeypatch.setitem(VERIFIERS._targets, "worst", "specdec_tests.rules:Worst")
    assert main(["ls"]) == 0
    assert "Follows the likeliest path, then adds the least likely token." in capsys.readouterr().out


def test_a_broken_plug_in_hides_nothing(capsys, monkeypatch):
    monkeypatch.setitem(DRAFTERS._targets, "broken", "no.such.module:Class")
    assert main(["ls"]) == 0
    printed = capsys.readouterr().out
    assert "'no.such.module:Class' cannot be imported" in printed
    assert "small_lm" in printed


# generate


def completion_of(workspace, prompt, *arguments):
    """What plain decoding says, by way of a study."""
    (workspace / "one.jsonl").write_text(json.dumps({"prompt": prompt}))
    assert main(["eval", *STUDY, "data.path=one.jsonl", "drafter=none", "hydra.run.dir=one", *arguments]) == 0
    return json.loads((workspace / "one" / "requests.jsonl").read_text())["plain"]["text"]


@pytest.mark.parametrize("drafter", ["none", "ngram", "self"])
def test_the_stream_is_the_final_text(workspace, capsys, drafter):
    expected = completion_of(workspace, "naïve", "sampling.max_tokens=30")
    capsys.readouterr()
    settings = [*SETTINGS, "sampling.max_tokens=30", f"drafter={drafter}"]
    assert main(["generate", "naïve", *settings]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"naïve{expected}\n"
    assert "30 tokens" in captured.err
    assert "tok/s" in captured.err
    assert "τ" in captured.err
    assert "\033" not in captured.out + captured.err


def test_the_prompt_can_come_from_standard_input(workspace, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert main(["generate", "-", *SETTINGS]) == 0
    assert capsys.readouterr().out.startswith("abc")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tokens_are_coloured_by_origin_on_a_terminal(workspace, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["generate", "abc", *SETTINGS, "drafter=self"]) == 0
    # Self-drafting accepts everything: green tokens, and a bonus in cyan.
    assert "\033[32m" in terminal.getvalue()
    assert "accepted" in capsys.readouterr().err


def test_an_interrupted_completion_ends_cleanly(workspace, monkeypatch, capsys):
    from specdec.engine.llm import LLM

    step, calls = LLM.step, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLM, "step", interrupted)
    assert main(["generate", "abc", *SETTINGS, "drafter=none"]) == 130
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "2 tokens" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abc", "drafter=ngrm"], "unknown drafter 'ngrm'"),
        (["abc", "sampling.max_tokns=3"], "unknown configuration key 'sampling.max_tokns'"),
        (["", "drafter=none"], "empty"),
    ],
)
def test_wrong_input(workspace, capsys, arguments, message):
    assert main(["generate", *arguments, *SETTINGS]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


# bench


def test_bench_step(workspace, capsys):
    arguments = [
        "bench",
        "step",
        "--target",
        "target",
        "--dtype",
        "float32",
        "--context",
        "20",
        "--repeats",
        "2",
    ]
    assert main([*arguments, "--compare", "transformers", "--json", "step.json"]) == 0
    assert "linears, 1 row" in capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads((workspace / "step.json").read_text())["rows"]}
    assert rows["linears, 1 row"]["ratio"] == 1
    assert 0 < rows["plain step, batch 1"]["bookkeeping"] < 1
    assert {"verify 8 nodes, batch 1", "verify 16 nodes, batch 1", "transformers step, batch 1"} <= set(rows)


def test_bench_verify(workspace, capsys):
    arguments = [
        "--target",
        "target",
        "--batch",
        "2",
        "--nodes",
        "4",
        "8",
        "--repeats",
        "1",
        "--context",
        "10",
    ]
    assert main(["bench", "verify", *arguments, "--json", "verify.json"]) == 0
    assert "rrsw, without_replacement" in capsys.readouterr().out
    rows = json.loads((workspace / "verify.json").read_text())["rows"]
    assert {row["nodes"] for row in rows} == {4, 8}
    assert all(0 < row["share_of_step"] < 1 for row in rows)
    assert {row["rule"] for row in rows} == set(VERIFIERS.names())
