"""Pairs that don't fit are refused when the engine is built, and the message names those that do."""

from __future__ import annotations

import re

import pytest
from specdec_tests.models import tiny_lm
from specdec_tests.serving import make_engine, speculate

from specdec.cli import main
from specdec.core import ProposalLaw
from specdec.drafters.base import DraftModel, DraftOutput, laws_of
from specdec.drafters.models.small_lm import SmallLMModel
from specdec.drafters.registry import DRAFTERS, TREES
from specdec.verifiers.registry import VERIFIERS

LM = tiny_lm()


@pytest.mark.parametrize("drafter", ["early_exit", "self"])
def test_a_tree_that_needs_marginals(drafter):
    message = (
        f"tree='ddtree' needs a drafter's marginals, drafter='{drafter}' provides conditionals; "
        "use drafter: ngram; or tree: best_first, chain, dyspec, eagle2, expansion, opt_tree, sequoia, static"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_engine(LM.target, speculate(drafter, "ddtree"))


def test_a_class_that_is_no_drafter():
    with pytest.raises(ValueError, match="expected a subclass of Drafter or DraftModel"):
        make_engine(LM.target, speculate("collections:Counter"))


def test_the_tree_is_refused_before_the_model_is_loaded(monkeypatch):
    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(SmallLMModel, "build", load)
    with pytest.raises(ValueError, match="needs a drafter's marginals"):
        make_engine(LM.target, speculate("small_lm", "ddtree", drafter_args={"model": LM.target}))


@pytest.mark.parametrize(
    ("tree", "args", "law", "verifier"),
    [
        ("dyspec", {}, "without_replacement", "token"),
        ("sequoia", {}, "without_replacement", "token"),
        ("static", {"draw": "with_replacement"}, "iid", "token"),
        ("expansion", {"draw": "without_replacement"}, "without_replacement", "token"),
    ],
)
def test_a_verifier_that_is_not_exact_for_the_law(tree, args, law, verifier):
    with pytest.raises(ValueError, match=f"'{verifier}' is not exact for the {law} law") as raised:
        make_engine(LM.target, speculate("self", tree, verifier, tree_args=args))
    named = re.findall(r"use verifier: ([\w, ]+)", str(raised.value))[0].split(", ")
    for name in VERIFIERS.names():
        cls = VERIFIERS.get(name)
        assert (name in named) == (ProposalLaw(law) in cls.laws and not cls.lossy)
    trees = re.findall(r"with tree: ([\w, ]+)", str(raised.value))[0].split(", ")
    fitting = VERIFIERS.get(verifier).laws
    assert trees == [name for name in TREES.names() if not fitting.isdisjoint(laws_of(TREES.get(name)))]


@pytest.mark.parametrize(
    ("tree", "args"),
    [("chain", {"sample": True}), ("dyspec", {}), ("expansion", {"draw": "with_replacement"})],
)
def test_a_shared_budget_for_drawn_trees(tree, args):
    config = speculate("self", tree, tree_args=args, max_batch_nodes=8)
    with pytest.raises(
        ValueError, match=r"max_batch_nodes=8: .* biases drawn trees .*: best_first, chain, ddtree"
    ):
        make_engine(LM.target, config)


def test_a_shared_budget_for_trees_without_scores():
    config = speculate("scripted", drafter_args={"script": [1]}, max_batch_nodes=8)
    with pytest.raises(
        ValueError, match="max_batch_nodes=8: the trees of drafter='scripted' carry no scores"
    ):
        make_engine(LM.target, config)


def test_ls_shows_what_each_gives_and_needs(capsys):
    assert main(["ls"]) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines() if "  " in line}
    for name in TREES.names():
        cls = TREES.get(name)
        assert " or ".join(law.value for law in laws_of(cls)) in lines[name]
        assert f"  {cls.needs.value}  " in lines[name]
    assert "  conditionals, marginals  " in lines["ngram"]
    assert "  conditionals  " in lines["early_exit"]
    assert "  whole trees  " in lines["scripted"]


def test_every_registered_tree_has_a_drafter_and_every_draft_model_a_tree():
    models = [cls for cls in map(DRAFTERS.get, DRAFTERS.names()) if issubclass(cls, DraftModel)]
    for name in TREES.names():
        cls = TREES.get(name)
        assert laws_of(cls)
        assert any(cls.needs in model.provides for model in models), name
    for model in models:
        assert model.provides
        promises = DraftOutput.MARGINALS in model.provides
        assert (model.marginals is not DraftModel.marginals) == promises
