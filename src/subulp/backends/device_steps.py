"""Step counters and scalars that stay on the device, so that a captured graph takes new ones at each replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from subulp.backends.bucket import Bucket
from subulp.batch import map_tensors


def advance_on_device(counters: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Adds one to each counter, or nothing if ``found_inf`` is not 0; reads nothing back to the host."""
    if found_inf is None:
        torch._foreach_add_(list(counters), 1)
        return
    for counter in counters:
        counter += (found_inf == 0).to(counter, non_blocking=True).view(())


def fill_on_device(
    bucket: Bucket,
    counters: Sequence[Tensor],
    owners: Sequence[dict[str, Any]],
    scalars: Callable[[dict[str, Any], Any], Sequence[Any]],
) -> None:
    """Gives the bucket the steps and the scalars of its members, whose groups ``owners`` are, as tensors on its device.

    The scalars are computed in fp64, as on the host. A device's ``pow`` may differ from the host's in the last bit of fp64,
    which changes the fp32 scalar once in about 2**29 steps.
    """
    exact = torch.stack([counters[i] for i in bucket.members]).to(bucket.device, torch.float64, non_blocking=True)
    tables = []
    start = 0
    for _, run in groupby(bucket.members, key=lambda i: id(owners[i])):
        own = list(run)
        steps = exact[start : start + len(own)]
        group = map_tensors(owners[own[0]], lambda t: t.to(bucket.device, torch.float64, non_blocking=True).view(()))
        rows = [
            v.expand(len(steps)) if isinstance(v, Tensor) else torch.full_like(steps, v) for v in scalars(group, steps)
        ]
        tables.append(torch.stack(rows, dim=1))
        start += len(own)
    bucket.steps = exact.to(torch.int64)
    bucket.scalars = torch.cat(tables)
    bucket.rows = range(len(exact))
