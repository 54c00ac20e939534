"""Every configuration file composes and becomes dataclasses; every wrong key and value is refused."""

from pathlib import Path
from typing import get_type_hints

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from specdec.cli.convert import study_config
from specdec.cli.overrides import prepare
from specdec.cli.sections import SECTIONS, unknown_key
from specdec.core import SamplingParams
from specdec.drafters.registry import DRAFTERS, TREES
from specdec.evaluation.config import TargetConfig
from specdec.verifiers.registry import VERIFIERS

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = [
    (path.parent.name, path.stem)
    for path in sorted(CONF.glob("*/*.yaml"))
    if path.parent.name not in ("experiment", "debug")
]
PRESETS = [
    (group, path.stem) for group in ("experiment", "debug") for path in sorted(CONF.glob(f"{group}/*.yaml"))
]
# Choices that need a value which no default can give.
NEEDS = {
    "small_lm": ["drafter.args.model=some/model"],
    "jsonl": ["data.path=a"],
    "huggingface": ["data.path=a"],
}
REGISTRIES = {"drafter": DRAFTERS, "tree": TREES, "verifier": VERIFIERS}


def composed(*overrides):
    with initialize_config_module("specdec.conf", version_base="1.3"):
        return study_config(compose("config", overrides=prepare(overrides)))


def test_the_default_is_ngram_on_the_packaged_model():
    study = composed()
    assert study.target == TargetConfig()
    assert study.speculative.drafter == "ngram"
    assert study.sampling.is_greedy


@pytest.mark.parametrize(("group", "choice"), GROUPS)
def test_groups(group, choice):
    composed(f"{group}={choice}", *NEEDS.get(choice, []))


@pytest.mark.parametrize(("group", "choice"), PRESETS)
def test_presets(group, choice):
    composed(f"{group}={choice}")


@pytest.mark.parametrize(("group", "choice"), [(g, c) for g, c in GROUPS if g in REGISTRIES and c != "none"])
def test_files_name_what_is_registered(group, choice):
    registry = REGISTRIES[group]
    config = OmegaConf.load(CONF / group / f"{choice}.yaml")
    assert config.name in registry.names()
    if group != "drafter":
        registry.create(config.name, **OmegaConf.to_container(config.args))


@pytest.mark.parametrize("pair", sorted(path.stem for path in (CONF / "pair").glob("*.yaml")))
def test_pairs_fit(pair):
    speculative = composed(f"pair={pair}").speculative
    assert pair.startswith(speculative.tree)
    assert pair.endswith(speculative.verifier)
    tree = TREES.create(speculative.tree, **speculative.tree_args)
    assert tree.law in VERIFIERS.get(speculative.verifier).laws


@pytest.mark.parametrize("group", REGISTRIES)
def test_everything_registered_has_a_file(group):
    named = {OmegaConf.load(path).name for path in (CONF / group).glob("*.yaml")}
    assert set(REGISTRIES[group].names()) <= named


def test_files_say_what_they_are():
    for path in CONF.glob("*/*.yaml"):
        assert any(line.startswith("# ") and "@package" not in line for line in path.read_text().splitlines())


def test_sampling_options():
    study = composed(
        "sampling.presence_penalty=0.5",
        "sampling.logit_bias={42:5,7:-1.5}",
        "sampling.allowed_token_ids=[1,2]",
        "sampling.min_tokens=4",
        "sampling.logprobs=3",
    )
    assert study.sampling == SamplingParams(
        temperature=0.0,
        seed=0,
        presence_penalty=0.5,
        logit_bias={42: 5, 7: -1.5},
        allowed_token_ids=(1, 2),
        min_tokens=4,
        logprobs=3,
    )


@pytest.mark.parametrize("choice", ["greedy", "temperature"])
def test_sampling_files_list_every_option(choice):
    assert set(OmegaConf.load(CONF / "sampling" / f"{choice}.yaml")) == set(get_type_hints(SamplingParams))


def test_debug_has_the_last_word():
    study = composed("experiment=batch8", "debug=fast")
    assert study.data.limit == 3
    assert study.logger.name == "none"
    assert study.measurement.batch_size == 8


def test_the_command_line_has_the_very_last_word():
    assert composed("debug=fast", "data.limit=7").data.limit == 7


@pytest.mark.parametrize("name", ["some/model", "./models/tiny", "gpt2", "/models/a b"])
@pytest.mark.parametrize("key", ["target", "target.name"])
def test_any_model_is_a_target(key, name):
    study = composed(f"{key}={name}", "target.dtype=float32")
    assert study.target == TargetConfig(name=name, dtype="float32")


@pytest.mark.parametrize("key", ["drafter", "drafter.name"])
def test_any_class_is_a_drafter(key):
    study = composed(f"{key}=specdec_tests.rules:Renamed", "drafter.args.max_n=3")
    assert study.speculative.drafter == "specdec_tests.rules:Renamed"
    assert study.speculative.drafter_args == {"max_n": 3}


def test_a_registered_name_without_a_file(monkeypatch):
    monkeypatch.setitem(VERIFIERS._targets, "worst", "specdec_tests.rules:Worst")
    assert composed("verifier=worst").speculative.verifier == "worst"


def test_a_cap_by_batch_size():
    assert composed("tree.max_nodes_by_batch={4:3,8:1}").speculative.max_nodes_by_batch == {4: 3, 8: 1}


@pytest.mark.parametrize("tree", ["chain", "eagle2", "specdec.drafters.trees.chain:ChainProposer"])
def test_a_budget_of_the_batch(tree):
    assert composed(f"tree={tree}").speculative.max_batch_nodes is None
    assert composed(f"tree={tree}", "tree.max_batch_nodes=16").speculative.max_batch_nodes == 16


def test_arguments_of_trees_go_through():
    times = composed("tree=sequoia", "tree.args.verify_times={0:20,8:25}").speculative.tree_args[
        "verify_times"
    ]
    assert times == {0: 20, 8: 25}
    assert composed("tree=static", "tree.args.paths=medusa").speculative.tree_args["paths"] == "medusa"


def test_flags_may_stand_between_overrides():
    assert prepare(["a=1", "-m", "--config-dir", "mine", "b=2"]) == [
        "a=1",
        "b=2",
        "-m",
        "--config-dir",
        "mine",
    ]


def test_files_of_the_user(tmp_path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "mine.yaml").write_text("name: ngram\nargs: {max_n: 2}\n")
    study = composed(f"hydra.searchpath=[file://{tmp_path}]", "drafter=mine")
    assert study.speculative.drafter_args == {"max_n": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter=ngrm", r"unknown drafter 'ngrm'.*did you mean 'ngram'"),
        ("tree=chian", r"unknown tree 'chian'.*did you mean 'chain'"),
        ("verifier=tokn", r"unknown verifier 'tokn'.*did you mean 'token'"),
        ("drafter=no.such:Class", r"cannot be imported"),
        ("target=smolm2-135m", r"unknown target 'smolm2-135m' \(did you mean 'smollm2-135m'\?\)"),
        ("sampling=greddy", r"unknown sampling 'greddy' \(did you mean 'greedy'\?\)"),
        ("experiment=quik", r"did you mean 'quick'"),
        ("+sampling.foo=1", r"unknown configuration key 'sampling.foo'"),
        ("+smapling=1", r"unknown configuration key 'smapling' \(did you mean 'sampling'\?\)"),
        ("sampling.max_tokens=many", r"sampling.max_tokens='many': expected int or null"),
        ("sampling.temperature=-1", r"temperature=-1"),
        ("sampling.top_p=0", r"top_p"),
        ("sampling.logit_bias={a:1}", r"sampling.logit_bias=\{'a': 1\}: expected a mapping"),
        ("sampling.stop_token_ids=[a]", r"stop_token_ids=\['a'\]: expected a list of int"),
        ("data.limit=0", r"data.limit=0"),
        ("data.chat=perhaps", r"data.chat='perhaps'"),
        ("eval.batch_size=0", r"batch_size=0"),
        ("eval.trace=1", r"eval.trace=1: expected bool"),
        ("drafter=small_lm", r"drafter.args.model has no value; set drafter.args.model=..."),
        ("logger.mode=sometimes", r"mode='sometimes'"),
        ("tree.max_nodes_by_batch={0:1}", r"max_nodes_by_batch\[0\]"),
        ("tree.max_batch_nodes=0", r"max_batch_nodes=0: expected max_batch_nodes >= 1"),
        ("tree.max_batch_nodes=many", r"max_batch_nodes='many': expected int or null"),
    ],
)
def test_refused(override, message):
    with pytest.raises(ValueError, match=message):
        composed(override)


def test_an_unknown_key_lists_the_known_ones():
    assert unknown_key("engine.block_sizes") == (
        "unknown configuration key 'engine.block_sizes' (did you mean 'block_size'?); known in 'engine': "
        "block_size, num_blocks, num_kv_tokens, max_num_seqs, max_num_batched_tokens, max_model_len, seed"
    )
    assert ", ".join(SECTIONS) in unknown_key("enigne")
