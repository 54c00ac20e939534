"""From a configuration to an ordered list of prompts."""

import random
from collections.abc import Callable, Sequence

from specdec.data.config import DataConfig
from specdec.data.huggingface import huggingface_prompts
from specdec.data.humaneval import humaneval_prompts
from specdec.data.jsonl import jsonl_prompts
from specdec.data.prompt import Prompt

SOURCES: dict[str, Callable[[DataConfig], Sequence[Prompt]]] = {
    "humaneval": humaneval_prompts,
    "jsonl": jsonl_prompts,
    "huggingface": huggingface_prompts,
}


def load_prompts(config: DataConfig) -> list[Prompt]:
    """Load a prompt set: shuffled by `config.seed` if asked, then cut to `config.limit`.

    Raises:
        ValueError: the set is missing, empty or malformed, or two of its prompts share an id.
    """
    prompts = SOURCES[config.name](config)
    if len(prompts) == 0:
        raise ValueError(f"data={config.name}: {config.path} holds no prompts; expected at least one")
    order = list(range(len(prompts)))
    if config.shuffle:
        random.Random(config.seed).shuffle(order)
    chosen = [prompts[index] for index in order[: config.limit]]
    _check_ids(chosen)
    return chosen


def _check_ids(prompts: list[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(
                f"prompt id {prompt.id!r} appears twice; results are kept by id, so make ids unique"
            )
        seen.add(prompt.id)
