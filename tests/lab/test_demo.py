"""`subulp demo` from end to end, short."""

from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from subulp.lab import cli, presentation, training, variants
from subulp.lab.tiny_lm import load_text


def test_it_prints_the_tables_and_writes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curves.png"
    assert cli.main(["demo", "--quick", "--steps", "3", "--seed", "5", "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert load_text().digest in printed
    assert all(printed.count(variant.name) >= 3 for variant in variants.VARIANTS)
    assert "What this does not show" in printed
    assert "says nothing about bf16 states" in printed
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert picture.width > picture.height > 400


def test_a_terminal_sees_live_progress() -> None:
    text = load_text()
    plan = training.Plan(steps=4, seed=0, measures=2, validation_sequences=4)
    runs = [training.Run(variant, text, plan) for variant in variants.VARIANTS]
    console = Console(force_terminal=True, width=100, record=True)
    with console.capture() as captured, presentation.Watch(console, runs, plan.steps) as watch:
        training.train_all(runs, text, plan, watch)
        watch()
    shown = captured.get()
    assert "4/4" in shown
    assert "exp_avg_sq / exact" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "must be an integer >= 1"),
        (["--steps", "many"], "--steps"),
        (["--seed", "-1"], r"must be an integer in [0, 2**63)"),
    ],
)
def test_wrong_values_exit_with_2(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_missing_folder_is_found_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--out", str(tmp_path / "absent" / "x.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err
