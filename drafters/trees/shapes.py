"""Published tree shapes by name, each a list of paths of sibling ranks: [0, 2] is the third-best child of the best.

default   two branches on the first levels, one below: a shape that is never far off
medusa    63 nodes in four levels: `mc_sim_7b_63` of medusa/model/medusa_choices.py in FasterDecoding/Medusa;
          Medusa, arXiv:2401.10774
eagle1    25 nodes in five levels: eagle/model/choices.py in SafeAILab/EAGLE; EAGLE, arXiv:2401.15077
"""

from __future__ import annotations

from collections.abc import Mapping

Path = tuple[int, ...]
"""Sibling ranks from the root down."""


def _parse(text: str) -> tuple[Path, ...]:
    """Paths written as digits: "021" is (0, 2, 1)."""
    return tuple(tuple(map(int, path)) for path in text.split())


SHAPES: Mapping[str, tuple[Path, ...]] = {
    "default": _parse("0 1 2 00 01 10 000 001 0000"),
    "medusa": _parse(
        "0 1 2 3 4 5 6 7 8 9 "
        "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90 "
        "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 "
        "0000 0001"
    ),
    "eagle1": _parse(
        "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    ),
}
