"""What a child process made by ``fork`` must not do: wait for threads that only its parent has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

_forked = False


def _remember() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remember)


@contextmanager
def alone_after_fork() -> Iterator[None]:
    """torch's operations inside take one thread if this process is a fork.

    torch's thread pool does not survive a fork: an operation that wants it, a fill of 32768 elements for example, waits for
    ever (so does torch's own fused AdamW).
    """
    if not _forked or (threads := torch.get_num_threads()) == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def wait_for_all(helpers: list[Future[Any]]) -> list[Any]:
    """Their results; returns or raises only when every one has ended, also when an interrupt comes meanwhile.

    They write into tensors that the caller could free.
    """
    interrupted: BaseException | None = None
    for helper in helpers:
        while not helper.done():
            try:
                helper.exception()  # waits; the helper's own error is returned here
            except BaseException as error:
                interrupted = error
    if interrupted is not None:
        raise interrupted
    return [helper.result() for helper in helpers]
