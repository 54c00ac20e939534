"""`specdec` itself: help, version, unknown commands."""

import subprocess
import sys

import pytest

from specdec.cli import COMMANDS, main


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command(arguments, capsys):
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"{name} " in printed
        assert command.summary in printed


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specdec 0.")


def test_an_unknown_command_suggests_the_nearest(capsys):
    assert main(["evl"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'evl'; did you mean 'eval'?\n"


def test_help_imports_nothing_heavy():
    code = (
        "import sys, specdec\nfrom specdec.cli import main\nmain(['--help'])\n"
        "assert not {'torch', 'hydra', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_public_names_are_there():
    import specdec

    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        specdec.Nothing  # noqa: B018
