"""A class in a file of the current folder can be named on the command line of the installed program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILE = """
from specdec.drafters.base import DraftModel

class Mine(DraftModel):
    \"\"\"A drafter of one's own.\"\"\"
    def expand(self, frontier): ...
"""


def test_class_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_drafter.py").write_text(FILE, encoding="utf-8")
    program = Path(sys.executable).with_name("specdec")
    command = [str(program), "eval", "drafter=my_drafter:Mine", "logger=none", "--cfg", "job"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "my_drafter:Mine" in result.stdout
