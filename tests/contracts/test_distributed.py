"""Distributed training on this machine, in groups of 1 to 4 gloo processes. The checks are in distributed_*.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.distributed_worker import cases, key, outcomes

ROOT = Path(__file__).parents[2]


def _run(directory: Path, *mode: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.contracts.distributed_worker", str(directory), *mode]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr


def _assert_all_succeeded(directory: Path, name: str, size: int) -> None:
    failed = [said for said in outcomes(directory, name, size) if said]
    assert not failed, "\n".join(failed)


def _parameters(smoke: bool) -> list[object]:
    return [pytest.param(key(*case), case[1], id=key(*case)) for case in cases(smoke)]


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smoke")
    _run(directory, "smoke")
    return directory


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distributed")
    _run(directory)
    return directory


@pytest.mark.parametrize(("name", "size"), _parameters(smoke=True))
def test_in_two_processes(smoke_run: Path, name: str, size: int) -> None:
    _assert_all_succeeded(smoke_run, name, size)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), _parameters(smoke=False))
def test_in_every_group(full_run: Path, name: str, size: int) -> None:
    _assert_all_succeeded(full_run, name, size)
