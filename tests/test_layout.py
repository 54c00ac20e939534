"""The layout of the repository: links, names, what is packaged, and which way imports point."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("drafters", "verifiers", "kernels", "conf")
SOURCES = ("specdec", *LINKS, "tests", "experiments")

# What the engine may know of drafters and verifiers: contracts, names, how a model joins a tree, shared budgets.
CONTRACTS = {
    "specdec.drafters.base",
    "specdec.drafters.budget",
    "specdec.drafters.model_drafter",
    "specdec.drafters.registry",
    "specdec.verifiers.base",
    "specdec.verifiers.registry",
}
MAY_IMPORT_CONTRACTS = {"engine", "drafters"}
# What each part may import of specdec. Parts that are not listed sit on top of them all.
MAY_IMPORT = {
    "core": {"core"},
    "kernels": {"core", "kernels"},
    "models": {"core", "kernels", "models"},
    "data": {"core", "data"},
    "engine": {"core", "kernels", "models", "engine"},
    "drafters": {"core", "kernels", "models", "engine", "drafters"},
    "verifiers": {"core", "kernels", "verifiers"},
}
CONFIGURATION = {"hydra", "omegaconf", "wandb"}
MAY_CONFIGURE = {"cli", "evaluation", "training"}


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        # os.walk does not follow links, so each file is seen once, under its real folder.
        for parent, _, names in os.walk(ROOT / folder):
            yield from (Path(parent) / name for name in names if name.endswith(".py"))


def part_of(path: Path) -> str:
    """`kernels` for kernels/fused/op.py, `core` for specdec/core/tree.py, `cli` for specdec/cli.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "specdec" else parts[0]


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            # `from specdec import core` imports a part as `from specdec.core import tree` does.
            yield from (
                f"specdec.{alias.name}" if node.module == "specdec" else node.module for alias in node.names
            )


PACKAGE_FILES = sorted(python_files("specdec", *LINKS))


# Links and folders


@pytest.mark.parametrize("name", LINKS)
def test_link_is_relative_and_resolves(name):
    link = ROOT / "specdec" / name
    assert link.is_symlink(), f"{link} is no link: check out with symlinks (git config core.symlinks true)"
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_links_are_committed_as_links():
    command = ["git", "-C", str(ROOT), "ls-files", "--stage", *(f"specdec/{name}" for name in LINKS)]
    rows = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert {row.split("\t")[1]: row.split()[0] for row in rows} == {
        f"specdec/{name}": "120000" for name in LINKS
    }


@pytest.mark.parametrize("name", ["drafters", "verifiers", "kernels"])
def test_folder_is_no_package_of_its_own(name):
    assert not (ROOT / name / "__init__.py").exists(), f"{name}/ would shadow the PyPI package of that name"


def test_conf_is_a_package():
    assert (ROOT / "conf" / "__init__.py").is_file(), "Hydra's pkg://specdec.conf needs it"


@pytest.mark.parametrize("name", ["drafters", "verifiers", "kernels"])
def test_top_level_name_is_not_ours(name):
    spec = importlib.util.find_spec(name)
    origin = spec.origin if spec else None
    assert origin is None or not Path(origin).is_relative_to(ROOT / name)


def test_tests_are_not_importable():
    assert not list((ROOT / "tests").rglob("__init__.py")), "tests/kernels would shadow the PyPI package"
    assert not (ROOT / "conftest.py").exists(), "a conftest.py here puts the root on sys.path"


# Imports


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    part = part_of(path)
    for module in imported_modules(path):
        if not module.startswith("specdec."):
            continue
        imported = module.split(".")[1]
        if part in MAY_IMPORT_CONTRACTS and module in CONTRACTS:
            continue
        if part in MAY_IMPORT:
            assert imported in MAY_IMPORT[part], f"{part} may import {sorted(MAY_IMPORT[part])}, not {module}"
        assert imported != "cli" or part in ("cli", "__main__"), f"{module} is on top: nothing imports it"


def test_the_engine_names_no_drafter_or_verifier():
    for path in python_files("specdec/engine"):
        named = re.findall(r"specdec\.(?:drafters|verifiers)\.[\w.]+:\w+", path.read_text(encoding="utf-8"))
        assert not named, f"{path} names {named}: ask the registry, or take the object as an argument"


def test_configuration_stays_at_the_edge():
    for path in PACKAGE_FILES:
        used = {module.split(".")[0] for module in imported_modules(path)} & CONFIGURATION
        assert not used or part_of(path) in MAY_CONFIGURE, f"{path} imports {used}; take a frozen dataclass"


def test_nothing_imports_the_folders_by_their_own_names():
    for path in python_files(*SOURCES):
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert not roots & set(LINKS), f"{path} imports {roots & set(LINKS)}; import specdec.… instead"


# The wheel


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> set[str]:
    pytest.importorskip(
        "setuptools", minversion="77", reason="the wheel is built with the setuptools at hand"
    )
    source, wheels = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for name in ("specdec", *LINKS):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*build, "-w", str(wheels), str(source)], check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_only_specdec(wheel_names):
    roots = {name.split("/")[0] for name in wheel_names}
    assert {re.sub(r"-.*\.dist-info$", ".dist-info", root) for root in roots} == {
        "specdec",
        "specdec_lab.dist-info",
    }


def test_wheel_holds_all_of_specdec(wheel_names):
    expected = {"specdec/py.typed"}
    for suffix in ("py", "yaml", "cpp", "h"):
        for folder in ("specdec", *LINKS):
            prefix = "" if folder == "specdec" else "specdec/"
            expected |= {f"{prefix}{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob(f"*.{suffix}")}
    # rglob follows no links, so nothing is expected twice.
    assert expected <= wheel_names, f"not packaged: {sorted(expected - wheel_names)}"
