"""The configuration of a prompt set."""

from dataclasses import dataclass
from typing import Literal, get_args

SourceName = Literal["humaneval", "jsonl", "huggingface"]

# The options each source reads; setting another one is an error rather than a surprise.
SOURCE_OPTIONS: dict[str, tuple[str, ...]] = {
    "humaneval": (),
    "jsonl": ("path", "column"),
    "huggingface": ("path", "subset", "split", "column"),
}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which prompts, how many, in which order.

    Attributes:
        name: the source.
        path: `jsonl`: the file. `huggingface`: a dataset's name on the hub, a JSON, CSV or Parquet file, or a
            folder written by `save_to_disk`.
        subset: `huggingface`: the dataset's configuration, where it has several.
        split: `huggingface`: the split, where there are several.
        column: the key or column that holds the prompt; None where one of the usual names does.
        limit: how many prompts to keep, all where the set is smaller or the limit None.
        seed: the order of a shuffled set; the same seed gives the same prompts.
        shuffle: whether to shuffle before the limit applies.
        chat: whether prompts are put through the target's chat template; "auto" does so for conversations
            when the target has a template.

    Raises:
        ValueError: an unknown source, an option the source does not read, a missing path, a limit below 1.
    """

    name: SourceName = "humaneval"
    path: str | None = None
    subset: str | None = None
    split: str | None = None
    column: str | None = None
    limit: int | None = None
    seed: int = 0
    shuffle: bool = False
    chat: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.name not in get_args(SourceName):
            known = ", ".join(get_args(SourceName))
            raise ValueError(f"data.name={self.name!r} is unknown; choose one of {known}")
        for option in ("path", "subset", "split", "column"):
            if getattr(self, option) is not None and option not in SOURCE_OPTIONS[self.name]:
                value = getattr(self, option)
                raise ValueError(f"data.{option}={value!r} means nothing to data={self.name}; leave it out")
        if "path" in SOURCE_OPTIONS[self.name] and not self.path:
            raise ValueError(f"data={self.name} needs a path; set data.path")
        if self.limit is not None and self.limit < 1:
            raise ValueError(
                f"data.limit={self.limit} must be at least 1; leave it out to take the whole set"
            )
        if self.chat not in (True, False, "auto"):
            raise ValueError(f"data.chat={self.chat!r} must be true, false or auto")
