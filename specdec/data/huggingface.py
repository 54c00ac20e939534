"""Anything `datasets` reads: a name on the hub, a local file, a folder written by `save_to_disk`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from specdec.data.config import DataConfig
from specdec.data.prompt import Prompt, prompt_from_record

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


class Rows(Sequence[Prompt]):
    """The rows of a dataset as prompts, read when asked for: a limit on a large set costs what it keeps."""

    def __init__(self, table: Any, name: str, column: str | None) -> None:
        self._table = table
        self._name = name
        self._column = column

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        where = f"{self._name}[{index}]"
        # Tables spell a missing key as None.
        record = {key: value for key, value in self._table[index].items() if value is not None}
        return prompt_from_record(record, where=where, default_id=where, column=self._column)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))


def huggingface_prompts(config: DataConfig) -> Rows:
    """The rows of one split of a dataset.

    Raises:
        ValueError: the dataset can't be loaded; its split is unknown, or not named where there are several.
    """
    assert config.path is not None
    return Rows(_select_split(_load_splits(config), config), config.path, config.column)


def _load_splits(config: DataConfig) -> dict[str, Any]:
    import datasets

    path = Path(str(config.path)).expanduser()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            data = datasets.load_from_disk(str(path))
            return data if isinstance(data, dict) else {str(data.split or "train"): data}
        if path.is_file():
            return dict(datasets.load_dataset(_file_format(path), data_files=str(path)))
        # The split goes along, so that a large set's other splits are not downloaded.
        data = datasets.load_dataset(config.path, config.subset, split=config.split)
        return data if isinstance(data, dict) else {str(config.split): data}
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(
            f"data.path={config.path!r} (subset {config.subset!r}, split {config.split!r}) can't be loaded: "
            f"{error.__cause__ or error}. Expected a dataset's name on the hub, a JSON, CSV or Parquet file, "
            "or a folder written by save_to_disk"
        ) from error


def _file_format(path: Path) -> str:
    if path.suffix not in FILE_FORMATS:
        raise ValueError(f"its ending is {path.suffix!r}, which is none of {', '.join(FILE_FORMATS)}")
    return FILE_FORMATS[path.suffix]


def _select_split(splits: dict[str, Any], config: DataConfig) -> Any:
    if config.split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if config.split not in splits:
        raise ValueError(f"data.split={config.split!r}: {config.path} has {', '.join(splits)}; choose one")
    return splits[config.split]
