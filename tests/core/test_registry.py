"""Names to classes: lazily, with plug-ins, and with messages that help."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from specdec.core import Registry, registry


class Engine:
    """Makes things go.

    And more.
    """

    def __init__(self, cylinders: int, fuel: str = "wind") -> None:
        self.cylinders = cylinders
        self.fuel = fuel

    @classmethod
    def build(cls, context: str, **arguments) -> Engine:
        built = cls(**arguments)
        built.context = context
        return built


class Turbine(Engine):
    """Spins."""

    @classmethod
    def build(cls, context: str, blades: int = 3) -> Turbine:
        return cls(blades)


@pytest.fixture
def engines() -> Registry[Engine]:
    known = Registry("engine", {"fraction": "fractions:Fraction", "broken": "no.such:Thing"}, "test.engines")
    known.register("piston", Engine)
    known.register("turbine", Turbine)
    return known


@pytest.fixture
def plug_in(monkeypatch) -> Callable[[str, str], None]:
    def install(name: str, value: str) -> None:
        points = {"test.engines": [EntryPoint(name, value, "test.engines")]}
        monkeypatch.setattr(registry, "entry_points", lambda group: points.get(group, []))

    return install


def test_names_are_sorted(engines):
    assert engines.names() == ["broken", "fraction", "piston", "turbine"]


def test_classes_are_imported_on_first_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    known = Registry("engine", {"lazy": "colorsys:rgb_to_hsv"}, "test.engines")
    assert known.names() == ["lazy"]
    assert "colorsys" not in sys.modules
    known.get("lazy")
    assert "colorsys" in sys.modules


def test_create_passes_arguments(engines):
    engine = engines.create("piston", 4, fuel="rain")
    assert (engine.cylinders, engine.fuel) == (4, "rain")


def test_build_passes_the_context(engines):
    engine = engines.build("piston", "garage", cylinders=6)
    assert (engine.cylinders, engine.context) == (6, "garage")
    assert engines.build("turbine", "garage", blades=5).cylinders == 5


def test_unknown_names_list_the_known_and_the_nearest(engines):
    message = "unknown engine 'pistn'; did you mean 'piston'\\? Known: broken, fraction, piston, turbine$"
    with pytest.raises(ValueError, match=message):
        engines.get("pistn")


def test_far_off_names_get_no_suggestion(engines):
    with pytest.raises(
        ValueError, match="unknown engine 'zzzzzz'. Known: broken, fraction, piston, turbine$"
    ):
        engines.get("zzzzzz")


@pytest.mark.parametrize(
    ("call", "arguments"),
    [("create", {"cylindres": 4}), ("create", {}), ("create", {"cylinders": 4, "colour": "red"})],
    ids=["misspelt", "missing", "extra"],
)
def test_wrong_arguments_list_the_right_ones(engines, call, arguments):
    with pytest.raises(ValueError, match="engine 'piston': .*; its arguments are: cylinders, fuel"):
        getattr(engines, call)("piston", **arguments)


def test_wrong_build_arguments_list_the_right_ones(engines):
    with pytest.raises(
        ValueError, match="engine 'piston': .*cylindres.*; its arguments are: cylinders, fuel"
    ):
        engines.build("piston", "garage", cylinders=4, cylindres=4)
    with pytest.raises(ValueError, match="engine 'turbine': .*wings.*; its arguments are: blades"):
        engines.build("turbine", "garage", wings=4)


def test_errors_inside_a_class_are_not_hidden(engines):
    with pytest.raises(ZeroDivisionError):
        engines.create("fraction", 1, 0)


def test_plug_ins_are_found(engines, plug_in):
    plug_in("steam", "fractions:Fraction")
    assert "steam" in engines.names()
    assert engines.get("steam") is engines.get("fraction")


def test_plug_ins_do_not_replace_ours(engines, plug_in):
    plug_in("piston", "fractions:Fraction")
    assert engines.get("piston") is Engine
    assert engines.names().count("piston") == 1


def test_a_path_needs_no_name(engines):
    assert engines.get("collections:Counter").__name__ == "Counter"


@pytest.mark.parametrize("path", ["no.such:Thing", "collections:Thing", "collections:"])
def test_a_wrong_path_is_named(engines, path):
    with pytest.raises(ValueError, match=f"engine '{path}' cannot be imported"):
        engines.get(path)


def test_a_taken_name_is_refused(engines):
    engines.register("piston", Engine)
    with pytest.raises(ValueError, match="engine name 'piston' is taken by .*Engine; choose another name"):
        engines.register("piston", Turbine)


def test_describe_is_the_first_line(engines):
    assert engines.describe("piston") == "Makes things go."
