"""The command line: dispatch and exit statuses, with and without the optional packages."""

import json
import subprocess
import sys

import pytest

import subulp
from subulp.lab import cli, doctor

BARE = """
import sys
for name in ("rich", "matplotlib", "numba", "triton"):
    sys.modules[name] = None
from subulp.lab.cli import main
print(main(["doctor", "--json"]), main(["demo"]), sep=",", file=sys.stderr)
"""
"""Both commands in a process that can import none of the optional packages; the exit statuses go to stderr."""


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"subulp {command}" in capsys.readouterr().out


def test_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in cli.COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: subulp" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"subulp {subulp.__version__}\n"


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130


@pytest.mark.slow
def test_without_optional_packages_doctor_works_and_demo_says_how_to_install_them() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert {row["backend"] for row in report["backends"] if row["device"] == "cpu"} == {"eager"}
    assert report["self_test"] == []
    assert any("pip install 'subulp[cpu]'" in cure for cure in report["cures"])
    assert done.stderr == "`subulp demo` needs rich and matplotlib: pip install 'subulp[demo]'\n0,2\n"
