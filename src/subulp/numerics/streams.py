"""Which noise stream each parameter draws from; specified in docs/noise.md, "Streams"."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from torch import Tensor
from torch.nn import Module

from subulp.options import check_counter

BITS = 63
"""A stream is a number in [0, 2**63)."""

# Wrapper modules that put their own component into a parameter's qualified name.
_WRAPPER_COMPONENTS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}

_made: defaultdict[str, count[int]] = defaultdict(count)
_NUMBERS = 1 << 31


def stream_of_name(name: str) -> int:
    """A stable 63-bit stream id of a parameter's name, the same under DDP, FSDP, torch.compile and checkpointing.

    The prefixes which those wrappers add are removed: any ``_orig_mod``, ``_fsdp_wrapped_module`` and
    ``_checkpoint_wrapped_module`` component, and leading ``module`` components.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPER_COMPONENTS]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    digest = hashlib.blake2b(".".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def next_base(kind: str) -> int:
    """Where the streams of the next object whose parameters have no names begin: 2**32 apart, 0 for the first of its kind.

    Counted for each process, in the order of construction, so that replicas which run the same program count alike.
    """
    return (next(_made[kind]) % _NUMBERS) << 32


def named(parameters: Any) -> list[tuple[str | None, Tensor]]:
    """(name or None, tensor) of a module's parameters, of tensors, or of such pairs; TypeError for anything else."""
    items = parameters.named_parameters() if isinstance(parameters, Module) else parameters
    what = f"got a {type(parameters).__name__}: pass a module, its named_parameters(), or tensors"
    if isinstance(items, (Tensor, str)) or not isinstance(items, Iterable):
        raise TypeError(f"parameters {what} in a list.")
    pairs: list[Any] = [item if isinstance(item, tuple) else (None, item) for item in items]
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], str | None) or not isinstance(pair[1], Tensor):
            raise TypeError(f"parameters {what}; an entry is {pair!r}.")
    return pairs


def helper_base(kind: str, names: Sequence[str | None], stream: int | None) -> int:
    """Where the streams of a helper's tensors without names begin: at ``stream`` or, for None, apart from all others."""
    if stream is None:
        return next_base(kind) if None in names else 0
    return check_counter("stream", stream, BITS)


def helper_streams(kind: str, names: Sequence[str | None], base: int) -> list[int]:
    """The streams of a helper's tensors: of the name after its kind, which keeps them apart from an optimizer's."""
    return [
        stream_of_name(f"{kind}.{name}") if name is not None else (stream_of_name(f"{kind}.{i}") + base) % (1 << BITS)
        for i, name in enumerate(names)
    ]


def assign(groups: Sequence[Mapping[str, Any]], kept: Mapping[Tensor, int]) -> dict[Tensor, int]:
    """The stream of every parameter of these groups.

    ``kept`` are those that are settled; the others take the hash of their name, or else the group's ``"stream"`` plus
    their position among all parameters, counted up until it is free.
    """
    following = {stream: stream + 1 for stream in kept.values()}
    result = dict(kept)
    position = 0
    for group in groups:
        names = group.get("param_names")
        if names and len(names) != len(group["params"]):
            names = None  # ZeRO optimizers take parameters out of a group and leave all its names
        for i, p in enumerate(group["params"]):
            if p not in result:
                first = stream_of_name(names[i]) if names else (group.get("stream") or 0) + position
                result[p] = _take_free(first % (1 << BITS), following)
            position += 1
    return result


def _take_free(stream: int, following: dict[int, int]) -> int:
    """The first free stream from this one on. ``following`` leads from taken ones towards a free one, ever more directly."""
    passed = []
    while stream in following:
        passed.append(stream)
        stream = following[stream]
    following[stream] = stream + 1
    for taken in passed:
        following[taken] = stream + 1
    return stream
