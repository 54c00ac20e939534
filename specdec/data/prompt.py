"""One prompt, and how a record of a file or a dataset becomes one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""One turn of a conversation: `{"role": "user", "content": "..."}`."""

PROMPT_KEYS = ("prompt", "text", "messages", "turns")
ID_KEYS = ("id", "task_id", "question_id")


@dataclass(frozen=True)
class Prompt:
    """A plain text or a conversation: exactly one of `text` and `messages` is given.

    `reference` is whatever a study compares the output with: a solution, a test, an answer.
    """

    id: str
    text: str | None = None
    messages: list[Message] | None = None
    category: str | None = None
    reference: Any = None

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.messages is None), f"prompt {self.id}: text or messages, not both"


def prompt_from_record(record: object, *, where: str, default_id: str, column: str | None = None) -> Prompt:
    """Read one record.

    The prompt is the value of `column`, or of the one key among `prompt`, `text`, `messages` and `turns`.
    A string is plain text, a list of messages a conversation, a list of strings (`turns`, as in Spec-Bench)
    a conversation of which the first turn is asked. A conversation that ends with an assistant's answer is
    asked up to that answer, which becomes the reference.

    Args:
        record: a mapping from keys to values.
        where: the record's place, such as `prompts.jsonl:12`, for messages.
        default_id: the id of a record without `id`, `task_id` or `question_id`.
        column: the key that holds the prompt.

    Raises:
        ValueError: the record holds no prompt, more than one, or one of another form.
    """
    if not isinstance(record, Mapping):
        raise ValueError(
            f"{where}: expected a JSON object with one of {_listed(PROMPT_KEYS)}, got {record!r:.80}"
        )
    key = column or _prompt_key(record, where)
    if key not in record:
        raise ValueError(f"{where}: has no {key!r}; it has {_listed(record)}. Set data.column to one of them")
    text, messages, answer = _read_value(record[key], f"{where}: {key!r}")
    category = record.get("category")
    reference = record.get("reference")
    return Prompt(
        id=next((str(record[k]) for k in ID_KEYS if record.get(k) is not None), default_id),
        text=text,
        messages=messages,
        category=None if category is None else str(category),
        reference=answer if reference is None else reference,
    )


def _prompt_key(record: Mapping[str, Any], where: str) -> str:
    found = [key for key in PROMPT_KEYS if key in record]
    if len(found) == 1:
        return found[0]
    has = (
        f"has {_listed(found)} at once"
        if found
        else f"has none of {_listed(PROMPT_KEYS)}, only {_listed(record)}"
    )
    raise ValueError(f"{where}: {has}; say which holds the prompt with data.column")


def _read_value(value: object, where: str) -> tuple[str | None, list[Message] | None, str | None]:
    if isinstance(value, str):
        return _text(value, where), None, None
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        return None, [{"role": "user", "content": _text(value[0], where)}], None
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        messages = [{**message, "content": _text(message["content"], where)} for message in value]
        answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
        if messages:
            return None, messages, answer
    raise ValueError(
        f"{where}: expected a string, a list of strings, or a list of messages "
        f'such as {{"role": "user", "content": "..."}} with a question in it, got {value!r:.80}'
    )


def _is_message(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _text(value: str, where: str) -> str:
    # JSON can spell half of a surrogate pair, which no tokenizer can encode.
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: not valid Unicode at character {error.start}; remove it") from error
    return value


def _listed(names: object) -> str:
    assert isinstance(names, (list, tuple, Mapping))
    return ", ".join(repr(name) for name in names) or "no keys"
