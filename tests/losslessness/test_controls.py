"""The controls: they break what they say, and leave no trace."""

from __future__ import annotations

import pytest
import torch

from specdec.core import ProposalLaw, TokenTree
from specdec.losslessness.controls import CONTROLS, Conditions, broken, sort_siblings
from specdec.losslessness.power import Outcome, try_control
from specdec.losslessness.sampled import Samples, make_case, rounds

BY_NAME = {control.name: control for control in CONTROLS}


def drawn_tree() -> TokenTree:
    """Two requests; the children of the first root are in the wrong order, one of them has a child."""
    return TokenTree.from_lists(
        torch.tensor([0, 0]),
        [[(1, 0), (2, 0), (3, 1)], [(2, 0)]],
        torch.tensor([4, 9]),
        ProposalLaw.WITHOUT_REPLACEMENT,
        q=torch.tensor([[0.1, 0.2, 0.7, 0.0], [0.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.1]]),
        q_row=torch.tensor([0, 1, -1, -1, 2, -1]),
        score=torch.arange(6.0),
        draft_slots=torch.arange(6),
    )


def test_sorted_siblings_are_the_same_tree_in_another_order():
    tree = sort_siblings(drawn_tree())
    tree.validate()
    assert tree.tokens.tolist() == [0, 2, 1, 3, 0, 2]
    assert tree.parents.tolist() == [-1, 0, 0, 2, -1, 0]
    assert tree.q_row.tolist() == [0, -1, 1, -1, 2, -1]
    assert tree.draft_slots.tolist() == [0, 2, 1, 3, 4, 5]
    assert sort_siblings(tree).tokens.tolist() == tree.tokens.tolist()


@pytest.mark.parametrize(
    ("law", "reproduces", "distance", "names"),
    [
        (ProposalLaw.DETERMINISTIC, False, None, {"one coin", "residual is p", "forced acceptance"}),
        (
            ProposalLaw.CHAIN,
            False,
            0.4,
            {"q flattened", "p and q swapped", "one coin", "residual is p", "forced acceptance"},
        ),
        (ProposalLaw.IID, False, 0.4, set(BY_NAME)),
        (ProposalLaw.CHAIN, False, 0.0, {"q flattened", "one coin"}),
        (
            ProposalLaw.IID,
            True,
            0.4,
            {"p and q swapped", "one coin", "residual is p", "forced acceptance"},
        ),
    ],
)
def test_what_a_control_can_bias(law, reproduces, distance, names):
    conditions = Conditions(law=law, reproduces=reproduces, distance=distance)
    assert {control.name for control in CONTROLS if control.applies(conditions)} == names


def test_each_is_noticed_and_nothing_stays_broken(subject):
    own = subject("early_exit", "expansion", "rrsw", draw="without_replacement", sizes=(2, 2))
    case = make_case(own.plain, "first", own.prompts[0], own.sampling)
    honest = Samples(subject=own, cases=[case], first_seed=0)
    honest.extend(256)
    assert honest.worst()[1] > 1e-4
    for control in CONTROLS:
        result = try_control(control, honest, rounds(2048, 256), threshold=1e-5)
        assert result.outcome is Outcome.CAUGHT, result
    again = Samples(subject=own, cases=[case], first_seed=0)
    again.extend(256)
    assert again.agrees_with(honest)


def test_one_that_never_had_an_opportunity(subject):
    own = subject("early_exit", "chain", "token", sample=True, num_tokens=2)
    case = make_case(own.plain, "first", own.prompts[0], own.sampling)
    honest = Samples(subject=own, cases=[case], first_seed=0)
    honest.extend(64)
    with broken(own.engine, BY_NAME["siblings sorted"]):
        other = Samples(subject=own, cases=[case], first_seed=0)
        other.extend(64)
    assert other.agrees_with(honest)
