"""Compile the C++ kernels on first use and load them.

All `*/cpu.cpp` files become one shared library in a cache folder named after everything that shapes its
code: the sources, the flags, the compiler and the CPU. Compilation goes to a temporary file that is renamed
into place, so processes that start together are safe.

The library must share torch's OpenMP runtime: a second thread pool would spin against the first. It is
therefore linked against the `libgomp` inside the torch wheel, by its own name, wherever torch ships one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
SOURCE_FOLDER = Path(__file__).parent


class BuildError(RuntimeError):
    """The kernels could not be compiled or loaded; the message says why and what to install."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None (with one warning) where they cannot be built."""
    try:
        return _build_and_load()
    except BuildError as error:
        logger.warning("CPU kernels fall back to PyTorch, which is several times slower. %s", error)
        return None


@functools.cache
def require_library() -> ctypes.CDLL:
    """The loaded kernels.

    Raises:
        BuildError: they cannot be built.
    """
    return library() or _build_and_load()


def describe_toolchain() -> str:
    """Compiler and widest vector extension, such as `"g++ 12.2, avx512"`."""
    compiler = find_compiler()
    if compiler is None:
        return "no compiler"
    version = re.search(r"(\d+\.\d+)", _compiler_version(compiler))
    return f"{Path(compiler).name} {version.group(1) if version else '?'}, {_vector_extension()}"


def find_compiler() -> str | None:
    """Path of the C++ compiler: `$CXX`, else the first of g++, c++, clang++ on the PATH."""
    candidates = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """`$SPECDEC_CACHE_DIR`, else `$XDG_CACHE_HOME/specdec`, else `~/.cache/specdec`."""
    if own := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"


def _build_and_load() -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("No C++ compiler found: install g++ (Debian: apt-get install g++) or set CXX.")
    path = cache_folder() / "kernels" / _fingerprint(compiler) / "libspecdec_kernels.so"
    if not path.exists():
        _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load ({error}); delete it to compile it again.") from error


def _compile(compiler: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    except OSError as error:
        raise BuildError(
            f"Cannot write {path.parent} ({error}); set SPECDEC_CACHE_DIR to a writable folder."
        ) from error
    os.close(descriptor)
    command = [
        compiler,
        *FLAGS,
        f"-I{SOURCE_FOLDER}",
        *map(str, _sources()),
        *_openmp_libraries(),
        "-o",
        temporary,
    ]
    logger.info("Compiling the CPU kernels once for this machine: %s", path)
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            failure = result.stderr[-2000:]
            raise BuildError(
                f"{' '.join(command)} failed; g++ 12 or newer is needed, set CXX to it:\n{failure}"
            )
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _sources() -> list[Path]:
    return sorted(SOURCE_FOLDER.glob("*/cpu.cpp"))


def _openmp_libraries() -> list[str]:
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    # --as-needed drops the compiler's own -lgomp, which comes later on the command line.
    return ["-Wl,--as-needed", str(bundled[0])] if bundled else []


def _fingerprint(compiler: str) -> str:
    parts = [*FLAGS, *_openmp_libraries(), compiler, _compiler_version(compiler), *_cpu_identity()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in (*_sources(), *sorted(SOURCE_FOLDER.glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


@functools.cache
def _compiler_version(compiler: str) -> str:
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return result.stdout.splitlines()[0] if result.stdout else "unknown"


@functools.cache
def _cpu_identity() -> tuple[str, str]:
    """Model name and feature flags: what `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith(("model name", "flags", "Features"))]
    return platform.machine(), "\n".join(sorted(set(lines)))


def _vector_extension() -> str:
    flags = _cpu_identity()[1]
    return next((name for name in ("avx512", "avx2", "asimd", "sse2") if name in flags), platform.machine())
