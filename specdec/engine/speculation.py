"""Building speculation: drafter, tree and verifier by name, refused when the pair is not exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.core import ProposalLaw, Registry
from specdec.drafters.base import Drafter, DrafterContext, DraftModel, DraftOutput, laws_of
from specdec.drafters.budget import BudgetedDrafter
from specdec.drafters.model_drafter import ModelDrafter
from specdec.drafters.registry import DRAFTERS, TREES
from specdec.engine.config import NO_DRAFTER, SpeculativeConfig
from specdec.verifiers.base import Verifier
from specdec.verifiers.registry import VERIFIERS


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """A drafter and a verifier that fit each other."""

    drafter: Drafter | None
    """None decodes plainly, with the verifier's own way of drawing."""
    verifier: Verifier
    config: SpeculativeConfig


def build_speculation(config: SpeculativeConfig, context: DrafterContext) -> Speculation:
    """Creates what a config names.

    Raises:
        ValueError: an unknown name or argument, a verifier that is not exact for the proposal law, a tree that
            needs what the drafter doesn't provide, or a shared budget for a law it would break; the message
            lists what works.
    """
    verifier = VERIFIERS.create(config.verifier, **config.verifier_args)
    if config.drafter == NO_DRAFTER:
        return Speculation(drafter=None, verifier=verifier, config=config)
    drafter = build_drafter(config, context)
    if drafter.law not in verifier.laws:
        raise ValueError(_not_exact(config, drafter, verifier))
    if config.max_batch_nodes is not None:
        _check_budget(config, drafter)
        drafter = BudgetedDrafter(drafter, config.max_batch_nodes)
    return Speculation(drafter=drafter, verifier=verifier, config=config)


def build_drafter(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    """A drafter class as it is, or a draft model joined with the configured tree."""
    cls = DRAFTERS.get(config.drafter)
    if issubclass(cls, Drafter):
        drafter = DRAFTERS.build(config.drafter, context, **config.drafter_args)
        assert isinstance(drafter, Drafter)
        return drafter
    if not issubclass(cls, DraftModel):
        raise ValueError(f"drafter={config.drafter!r}: expected a subclass of Drafter or DraftModel")
    # The tree comes before the model, which may take long to load.
    tree = TREES.create(config.tree, **config.tree_args)
    if tree.needs not in cls.provides:
        raise ValueError(_lacks(config, tree.needs, cls))
    model = DRAFTERS.build(config.drafter, context, **config.drafter_args)
    assert isinstance(model, DraftModel)
    return ModelDrafter(model, tree)


def _not_exact(config: SpeculativeConfig, drafter: Drafter, verifier: Verifier) -> str:
    exact = _names(VERIFIERS, lambda cls: drafter.law in cls.laws and not cls.lossy)
    message = (
        f"verifier={config.verifier!r} is not exact for the {drafter.law.value} law of "
        f"drafter={config.drafter!r} with tree={config.tree!r}; use verifier: {', '.join(exact)}"
    )
    trees = _names(TREES, lambda cls: not verifier.laws.isdisjoint(laws_of(cls)))
    if not isinstance(drafter, ModelDrafter) or not trees:
        return message
    laws = ", ".join(sorted(law.value for law in verifier.laws))
    return f"{message}; or keep it and draft by one of its laws ({laws}) with tree: {', '.join(trees)}"


def _lacks(config: SpeculativeConfig, needs: DraftOutput, model: type[DraftModel]) -> str:
    drafters = _names(DRAFTERS, lambda cls: issubclass(cls, DraftModel) and needs in cls.provides)
    trees = _names(TREES, lambda cls: cls.needs in model.provides)
    provided = ", ".join(sorted(output.value for output in model.provides))
    return (
        f"tree={config.tree!r} needs a drafter's {needs.value}, drafter={config.drafter!r} provides {provided}; "
        f"use drafter: {', '.join(drafters)}; or tree: {', '.join(trees)}"
    )


def _check_budget(config: SpeculativeConfig, drafter: Drafter) -> None:
    shared = f"max_batch_nodes={config.max_batch_nodes}"
    if drafter.law.needs_q:
        trees = _names(TREES, lambda cls: ProposalLaw.DETERMINISTIC in laws_of(cls))
        raise ValueError(
            f"{shared}: a shared budget keeps nodes by the scores of their tokens, which biases drawn trees (law "
            f"{drafter.law.value} of drafter={config.drafter!r} with tree={config.tree!r}); leave it out, cap with "
            f"max_nodes_by_batch, or use a deterministic tree: {', '.join(trees)}"
        )
    if not drafter.scores_nodes:
        raise ValueError(
            f"{shared}: the trees of drafter={config.drafter!r} carry no scores to share by; leave it out or cap "
            "with max_nodes_by_batch"
        )


def _names(registry: Registry[Any], fits: Callable[[Any], bool]) -> list[str]:
    """Registered names whose class fits; a plug-in that can't be imported is none."""
    names = []
    for name in registry.names():
        try:
            cls = registry.get(name)
        except ValueError:
            continue
        if fits(cls):
            names.append(name)
    return names
