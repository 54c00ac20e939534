"""Building speculation: drafter, tree and verifier by name, refused when the pair is not exact."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.drafters.base import Drafter, DrafterContext
from specdec.drafters.model_drafter import ModelDrafter
from specdec.drafters.registry import DRAFTERS, TREES
from specdec.engine.config import SpeculativeConfig
from specdec.verifiers.base import Verifier
from specdec.verifiers.registry import VERIFIERS


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """A drafter and a verifier that fit each other."""

    drafter: Drafter
    verifier: Verifier
    config: SpeculativeConfig


def build_speculation(config: SpeculativeConfig, context: DrafterContext) -> Speculation:
    """Creates what a config names.

    Raises:
        ValueError: an unknown name or argument, or a verifier that is not exact for the proposal law; the
            message lists the verifiers that are.
    """
    verifier = VERIFIERS.create(config.verifier, **config.verifier_args)
    drafter = build_drafter(config, context)
    if drafter.law not in verifier.laws:
        exact = [name for name in VERIFIERS.names() if drafter.law in VERIFIERS.get(name).laws]
        raise ValueError(
            f"verifier={config.verifier!r} is not exact for the {drafter.law.value} law of "
            f"drafter={config.drafter!r} with tree={config.tree!r}; use verifier: {', '.join(exact)}"
        )
    return Speculation(drafter=drafter, verifier=verifier, config=config)


def build_drafter(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    """A drafter class as it is, or a draft model joined with the configured tree."""
    built = DRAFTERS.build(config.drafter, context, **config.drafter_args)
    if isinstance(built, Drafter):
        return built
    tree = TREES.create(config.tree, **config.tree_args)
    return ModelDrafter(built, tree)
