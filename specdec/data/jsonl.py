"""A JSONL file of the user's: one JSON object a line."""

import json
from pathlib import Path
from typing import Any

from specdec.data.config import DataConfig
from specdec.data.prompt import Prompt, prompt_from_record


def jsonl_prompts(config: DataConfig) -> list[Prompt]:
    """Read every line of `config.path`; blank lines are skipped, a byte order mark is allowed.

    Raises:
        ValueError: no such file; a line, named as `file:line`, that is not UTF-8, not JSON or not a prompt.
    """
    assert config.path is not None
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise ValueError(f"data.path={config.path!r} is no file (looked in {Path.cwd()}); give a JSONL file")
    prompts = []
    # Bytes split at line ends only; text would also split at characters such as U+2028, which JSON allows.
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        if line.strip():
            where = f"{path}:{number}"
            record = _parse(line, where)
            default_id = f"{path.stem}/{number}"
            prompts.append(
                prompt_from_record(record, where=where, default_id=default_id, column=config.column)
            )
    return prompts


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON at column {error.colno} ({error.msg}); write one object a line"
        ) from error
