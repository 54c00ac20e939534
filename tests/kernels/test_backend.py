"""Choosing an implementation, and building the compiled one."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec.kernels import build
from specdec.kernels.backend import backend_for, describe_backend, use_backend

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="reference, torch, cpp"), use_backend("cuda"):  # type: ignore[arg-type]
        pass


@needs_compiler
def test_choice_by_dtype() -> None:
    with use_backend(None):
        assert backend_for(torch.empty(0)) == "cpp"
        assert backend_for(torch.empty(0, dtype=torch.bfloat16)) == "cpp"
        assert backend_for(torch.empty(0, dtype=torch.float64)) == "torch"
        assert describe_backend().startswith("cpp (")
    with use_backend("torch"):
        assert describe_backend() == "torch"
    with use_backend("cpp"), pytest.raises(ValueError, match="float64"):
        backend_for(torch.empty(0, dtype=torch.float64))


def test_no_compiler_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    build.library.cache_clear()
    build.require_library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING), use_backend(None):
            assert backend_for(torch.empty(0)) == backend_for(torch.empty(1)) == "torch"
        (record,) = caplog.records
        assert "install g++" in record.message
        with use_backend("cpp"), pytest.raises(build.BuildError, match="install g"):
            backend_for(torch.empty(0))
    finally:
        build.library.cache_clear()
        build.require_library.cache_clear()


@needs_compiler
def test_a_failed_compilation_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ("-std=c++98", "-Werror"))
    build.library.cache_clear()
    build.require_library.cache_clear()
    try:
        with pytest.raises(build.BuildError, match="error"):
            build.require_library()
        assert not list(tmp_path.rglob("*.so"))
    finally:
        build.library.cache_clear()
        build.require_library.cache_clear()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPECDEC_CACHE_DIR", raising=False)
    assert build.cache_folder() == tmp_path / "specdec"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "own"))
    assert build.cache_folder() == tmp_path / "own"


@needs_compiler
def test_processes_that_start_together_share_one_build(tmp_path: Path) -> None:
    code = "from specdec.kernels.backend import describe_backend; print(describe_backend())"
    environment = {**os.environ, "SPECDEC_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert all(
        process.communicate()[0].startswith("cpp") and process.returncode == 0 for process in processes
    )
    assert [path.name for path in tmp_path.rglob("*.so")] == ["libspecdec_kernels.so"]


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime_is_loaded() -> None:
    library = build.require_library()
    assert isinstance(library, ctypes.CDLL)
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes
