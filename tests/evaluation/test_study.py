"""A study and its folder."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import yaml
from specdec_tests.folders import PROMPTS, SIZES

from specdec.core import SamplingParams
from specdec.data import DataConfig
from specdec.engine.config import SpeculativeConfig
from specdec.evaluation.config import LoggerConfig, MeasurementConfig, TargetConfig
from specdec.evaluation.study import run_study
from specdec.evaluation.table import study_table

FILES = {
    "config.yaml",
    "provenance.json",
    "metrics.json",
    "requests.jsonl",
    "trace.parquet",
    "steps.parquet",
    "speedup.png",
    "survival.png",
    "report.html",
}
SAMPLED = SamplingParams(temperature=1.0, max_tokens=10, seed=3)


def requests_of(folder):
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def test_the_folder_has_everything(finished):
    assert {path.name for path in finished.folder.iterdir()} >= FILES
    assert json.loads((finished.folder / "metrics.json").read_text()) == finished.metrics


def test_the_configuration_is_resolved(finished):
    config = yaml.safe_load((finished.folder / "config.yaml").read_text())
    assert config["speculative"]["drafter"] == "ngram"
    assert config["sampling"]["max_tokens"] == 12
    assert config["target"]["dtype"] == "float32"


def test_provenance_names_code_and_machine(finished):
    found = json.loads((finished.folder / "provenance.json").read_text())
    assert found["versions"]["torch"]
    assert found["kernels"]
    assert found["threads"] >= 1
    assert found["seeds"] == {"sampling": 0, "engine": 0, "data": 0, "bootstrap": 0}


def test_the_report_needs_no_other_file(finished):
    page = (finished.folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "outputs equal to plain" in page
    assert "http://" not in page


def test_both_variants_of_every_prompt(finished):
    requests = requests_of(finished.folder)
    assert [request["id"] for request in requests] == [f"p{index}" for index in range(len(PROMPTS))]
    for request in requests:
        assert request["plain"]["token_ids"] == request["speculative"]["token_ids"]
        assert request["plain"]["text"] == request["speculative"]["text"]
        assert request["comparison"]["verdict"] == "identical"
        assert 0 < request["plain"]["ttft"] <= request["plain"]["seconds"]


def test_counts_add_up(finished):
    requests = [request["speculative"] for request in requests_of(finished.folder)]
    acceptance = finished.metrics["speculative"]["acceptance"]
    for name in ("num_steps", "num_emitted", "num_drafted", "num_accepted"):
        assert acceptance[name] == sum(request[name] for request in requests)
    tokens = sum(len(request["token_ids"]) for request in requests)
    assert finished.metrics["speculative"]["num_tokens"] == tokens
    assert acceptance["num_emitted"] + len(requests) == tokens
    assert acceptance["length"]["value"] == acceptance["num_emitted"] / acceptance["num_steps"]
    assert acceptance["rate"]["value"] == acceptance["num_accepted"] / acceptance["num_drafted"]


def test_plain_decoding_has_no_acceptance_rate(finished):
    acceptance = finished.metrics["plain"]["acceptance"]
    assert acceptance["length"]["value"] == 1.0
    assert acceptance["rate"] is None
    assert "n/a" in study_table(finished.metrics).plain()


def test_shares_add_up(finished):
    for variant in ("plain", "speculative"):
        assert sum(finished.metrics[variant]["time_shares"].values()) == pytest.approx(1)


def test_memory_counts_pages(finished):
    memory = finished.metrics["plain"]["memory"]
    pages = SIZES.pool_blocks
    assert memory["pool_bytes"] % pages == 0
    assert memory["peak_bytes"] % (memory["pool_bytes"] // pages) == 0
    assert 0 < memory["peak_bytes"] < memory["pool_bytes"]


def test_a_busy_machine_is_noticed(finished):
    def notes(itl):
        return study_table({**finished.metrics, "plain": {**finished.metrics["plain"], "itl": itl}}).notes

    assert any("4.0 × its p50: the machine was busy" in note for note in notes({"p50": 0.02, "p95": 0.08}))
    assert not any("busy" in note for note in notes({"p50": 0.02, "p95": 0.025}))
    assert not any("busy" in note for note in notes({"p50": None, "p95": None}))


def test_speedup_is_the_ratio_of_the_rates(finished):
    rates = [finished.metrics[name]["tokens_per_second"]["value"] for name in ("plain", "speculative")]
    speedup = finished.metrics["speedup"]["total"]
    assert speedup["value"] == pytest.approx(rates[1] / rates[0])
    assert speedup["low"] <= speedup["value"] <= speedup["high"]


def test_steps_have_their_times(finished):
    steps = pq.read_table(finished.folder / "steps.parquet").to_pylist()
    for variant in ("plain", "speculative"):
        own = [step for step in steps if step["variant"] == variant]
        assert [step["step"] for step in own] == list(range(len(own)))
        seconds = sum(
            step[phase] for step in own for phase in ("schedule", "draft", "forward", "verify", "commit")
        )
        assert seconds == pytest.approx(finished.metrics[variant]["seconds"])
        assert sum(step["num_emitted"] for step in own) == finished.metrics[variant]["num_tokens"]
        assert sum(step["has_prefill"] for step in own) == len(PROMPTS)


def test_a_finished_study_is_not_run_again(finished):
    before = {path: path.stat().st_mtime_ns for path in finished.folder.iterdir() if path.name in FILES}
    assert run_study(finished.config, finished.folder) == finished.metrics
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_results_of_another_configuration_are_not_overwritten(finished):
    other = replace(finished.config, measurement=MeasurementConfig(seed=5))
    with pytest.raises(ValueError, match="another configuration"):
        run_study(other, finished.folder)


def test_an_unfinished_study_is_run_again(study, tmp_path):
    config = study(data=DataConfig(name="jsonl", path=str(tmp_path / "missing.jsonl")))
    with pytest.raises(ValueError, match="missing.jsonl"):
        run_study(config, tmp_path / "run")
    assert "missing.jsonl" in json.loads((tmp_path / "run" / "failure.json").read_text())["error"]
    (tmp_path / "missing.jsonl").write_text(json.dumps({"prompt": "now it is there"}))
    run_study(config, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.json").is_file()
    assert not (tmp_path / "run" / "failure.json").exists()


def test_plain_decoding_alone(study, tmp_path):
    metrics = run_study(study(None), tmp_path)
    assert "speedup" not in metrics
    assert not (tmp_path / "trace.parquet").exists()
    assert "plain decoding" in study_table(metrics).title


def test_batches(study, tmp_path):
    metrics = run_study(
        study(measurement=MeasurementConfig(batch_size=2, warmup_tokens=1, resamples=200)), tmp_path
    )
    steps = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    assert max(step["num_requests"] for step in steps) == 2
    assert {step["batch"] for step in steps} == {0, 1, 2}
    assert metrics["equality"]["identical"] == len(PROMPTS)


def test_a_wrong_rule_is_called_a_bug(study, tmp_path):
    wrong = SpeculativeConfig(
        drafter="scripted", drafter_args={"script": [0]}, verifier="specdec_tests.rules:Worst"
    )
    equality = run_study(study(wrong), tmp_path)["equality"]
    assert equality["applicable"]
    assert equality["bug"] > 0


def test_a_lossy_rule_is_not_compared(study, tmp_path):
    lossy = SpeculativeConfig(drafter="ngram", verifier="specdec_tests.rules:WorstButLossy")
    metrics = run_study(study(lossy), tmp_path)
    assert metrics["equality"] == {"applicable": False}
    assert "(lossy)" in study_table(metrics).title


def test_sampling_with_rejection_is_not_compared(study, tmp_path):
    metrics = run_study(
        study(SpeculativeConfig(drafter="ngram", verifier="token"), sampling=SAMPLED), tmp_path
    )
    assert metrics["equality"] == {"applicable": False}
    assert "not applicable" in study_table(metrics).plain()


def test_target_only_reproduces_samples(study, tmp_path):
    config = study(SpeculativeConfig(drafter="ngram", verifier="target_only"), sampling=SAMPLED)
    equality = run_study(config, tmp_path)["equality"]
    assert equality["identical"] == len(PROMPTS)


def test_a_prompt_that_cannot_be_served_fails_alone(study, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 200}) + "\n" + json.dumps({"prompt": "short"}))
    metrics = run_study(study(data=DataConfig(name="jsonl", path=str(path))), tmp_path / "run")
    assert metrics["equality"]["failed"] == 1
    assert metrics["equality"]["identical"] == 1
    assert "200 tokens" in requests_of(tmp_path / "run")[0]["plain"]["error"]


def test_a_target_that_is_not_there_is_named(study, tmp_path):
    target = TargetConfig(name="no-such-owner/no-such-model", local_files_only=True)
    with pytest.raises(ValueError, match="target='no-such-owner/no-such-model' cannot be loaded"):
        run_study(study(target=target), tmp_path)


def test_nothing_that_can_be_served_is_an_error(study, tmp_path):
    greedy = SpeculativeConfig(drafter="ngram", verifier="greedy")
    with pytest.raises(ValueError, match="none of the 5 prompts could be served; .*temperature=1.0"):
        run_study(study(greedy, sampling=SAMPLED), tmp_path)


def test_a_batch_larger_than_the_engine_is_refused(study):
    with pytest.raises(ValueError, match=r"eval.batch_size=32: .*engine.max_num_seqs=16"):
        study(measurement=MeasurementConfig(batch_size=32))


def test_wandb_offline(study, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = study(logger=LoggerConfig(name="wandb"))
    run_study(config, tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("fails", [False, True])
def test_wandb_runs_are_finished(study, tmp_path, monkeypatch, fails):
    import wandb

    codes, summary = [], {}

    class Run:
        def __init__(self):
            self.summary = summary

        def log(self, values):
            assert "acceptance_by_position" in values

        def finish(self, exit_code):
            codes.append(exit_code)

    def init(**settings):
        assert settings["dir"] == tmp_path
        assert settings["mode"] == "offline"
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    broken = SpeculativeConfig(drafter="specdec_tests.rules:Broken")
    config = study(*([broken] if fails else []), logger=LoggerConfig(name="wandb"))
    if fails:
        with pytest.raises(ValueError, match="broken on purpose"):
            run_study(config, tmp_path)
    else:
        run_study(config, tmp_path)
        assert summary["speedup/total/value"] > 0
        assert summary["speculative/acceptance/length/value"] >= 1
    assert codes == [int(fails)]
