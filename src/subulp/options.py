"""The options that every optimizer shares: types, defaults, validation and normal form."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from subulp.storage import CODECS

StateDtype = str | torch.dtype | Mapping[str, str | torch.dtype]


class Options(TypedDict, total=False):
    """Keyword options of every optimizer; each may also be set per parameter group."""

    maximize: bool
    """Ascend instead of descend (default False)."""
    foreach: bool | None
    """Accepted for compatibility with torch and ignored: tensors are always updated in buckets."""
    capturable: bool
    """Keep the step counter on the parameter's device, for graph capture (default False)."""
    differentiable: bool
    """Let autograd record the update; fp32 and fp64 parameters and states only (default False)."""
    fused: bool | None
    """Accepted for compatibility with torch and ignored: an update is always one fused expression."""
    stochastic_rounding: bool | str | Mapping[str, bool]
    """Round low-precision weights and states stochastically (default True); False rounds to nearest.

    Or by tensor, e.g. ``{"exp_avg": False}``: "param" is the weight, what is not named is rounded stochastically. A first
    moment has mean zero and no long memory, so that some keep it at nearest; a second moment at nearest cannot fall.
    """
    state_dtype: StateDtype
    """How states are stored: "param" (default), "fp32", "bf16", "fp16", a torch.dtype, or {state name: one of these}.

    "param" is the parameter's dtype; states that hold squares are bf16 under fp16 parameters, whose own exponent range
    would flush the square of every gradient below 2.4e-4.
    """
    weight_residual: str | int | None
    """Extra bits kept beside a bf16 weight. Only None exists yet."""
    seed: int
    """Seed of the rounding noise, 0 <= seed < 2**64 (default 0). Runs with equal seeds round equally."""
    stream: int | None
    """Where the noise streams of parameters without names begin (default None: 2**32 apart for each such optimizer).

    The count is one of the process, in the order of construction; checkpoints keep it. A number pins it: two optimizers with
    equal numbers and seeds draw equal noise. Names, where groups have them, decide alone.
    """
    backend: str
    """"auto" (default), "eager", "numba" or "triton"."""


DEFAULTS: dict[str, Any] = {
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "stochastic_rounding": True,
    "state_dtype": "param",
    "weight_residual": None,
    "seed": 0,
    "stream": None,
    "backend": "auto",
}

BACKENDS = ("auto", "eager", "numba", "triton")

Check = Callable[[str, Any], Any]

DTYPES = {codec.name: codec.dtype for codec in CODECS.values() if codec.bits >= 16} | {"fp64": torch.float64}
"""The dtypes of real parameters and of states; 8-bit formats are for the rounding functions alone."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float64": "fp64",
}
_PLANNED = ("int8", "factored")


def as_real(what: str, value: Any) -> float:
    """The value as a float, or TypeError if it is no number."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError(
                f"{what} is a tensor of shape {tuple(value.shape)}: pass a real number or a one-element tensor."
            )
        return float(value.detach())
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what}={value!r} is a {type(value).__name__}: pass a number, e.g. float(...) of it.")
    return float(value)


def check_nonnegative(what: str, value: Any) -> Any:
    """``value``, a finite number >= 0."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value  # reading it would wait for the device
    number = as_real(what, value)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{what}={value!r}: must be a finite number >= 0.")
    return value


def check_positive(what: str, value: Any) -> Any:
    """``value``, a finite number > 0."""
    if not 0.0 < as_real(what, value) < math.inf:
        raise ValueError(f"{what}={value!r}: must be a finite number > 0.")
    return value


def optional(check: Check) -> Check:
    """The same check, but None passes."""
    return lambda what, value: None if value is None else check(what, value)


def one_of(*choices: str) -> Check:
    """A check that the value is one of these strings."""

    def check(what: str, value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{what}={value!r}: must be one of {', '.join(map(repr, choices))}.")
        return str(value)

    return check


def tuple_of(*checks: Check) -> Check:
    """A check of a list or tuple by one check an entry; lists stay lists, since schedulers and trainers rewrite them."""

    def check(what: str, value: Any) -> Any:
        if isinstance(value, (str, Tensor)) or not isinstance(value, Iterable):
            raise TypeError(f"{what}={value!r} is a {type(value).__name__}: pass a tuple of {len(checks)} numbers.")
        entries = value if isinstance(value, (list, tuple)) else tuple(value)
        if len(entries) != len(checks):
            raise ValueError(f"{what}={value!r} has {len(entries)} entries: pass a tuple of {len(checks)} numbers.")
        for i, (entry, checked) in enumerate(zip(entries, checks, strict=True)):
            checked(f"{what}[{i}]", entry)
        return entries

    return check


def check_fraction(what: str, value: Any) -> Any:
    """``value``, a number in [0, 1)."""
    number = as_real(what, value)
    if not 0.0 <= number < 1.0:
        raise ValueError(f"{what}={value!r}: must be in [0, 1).")
    return value


check_betas = tuple_of(check_fraction, check_fraction)
"""A pair of numbers in [0, 1)."""


def check_flag(what: str, value: Any) -> bool:
    """A bool (0 and 1 are taken as such)."""
    if not isinstance(value, (bool, numbers.Real, np.bool_)) or value not in (True, False):
        raise TypeError(f"{what}={value!r}: must be True or False.")
    return bool(value)


def check_counter(what: str, value: Any, bits: int) -> int:
    """An int in [0, 2**bits)."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what}={value!r} is a {type(value).__name__}: pass an int in [0, 2**{bits}).")
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{what}={value!r}: must be in [0, 2**{bits}).")
    return int(value)


def _check_seed(what: str, value: Any) -> int:
    return check_counter(what, value, 64)


def _check_stream(what: str, value: Any) -> int | None:
    return None if value is None else check_counter(what, value, 63)


def _check_residual(what: str, value: Any) -> None:
    if value is None:
        return
    if value in ("kahan", 8, 16) and not isinstance(value, bool):
        raise NotImplementedError(f"{what}={value!r} does not exist yet: leave it None, or train fp32 weights.")
    raise ValueError(f"{what}={value!r}: must be None.")


def _dtype_name(what: str, value: Any) -> str:
    if isinstance(value, torch.dtype):
        if value in _DTYPE_NAMES:
            return _DTYPE_NAMES[value]
        raise ValueError(f"{what}={value}: states are stored as torch.float32, torch.bfloat16 or torch.float16.")
    if not isinstance(value, str):
        raise TypeError(
            f"{what}={value!r} is a {type(value).__name__}: pass a name such as 'bf16', a torch.dtype or a dict."
        )
    name = value.lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name in _PLANNED:
        raise NotImplementedError(f"{what}={value!r} does not exist yet: use 'param', 'bf16' or 'fp32'.")
    if name != "param" and name not in DTYPES:
        raise ValueError(
            f"{what}={value!r}: must be 'param', 'fp32', 'bf16', 'fp16', a torch.dtype or a dict of these."
        )
    return name


def _by_tensor(text: str) -> dict[str, str]:
    """The entries of ``"name:value,name:value"``."""
    return dict(item.split(":", 1) for item in text.replace(" ", "").split(","))


def normal_state_dtype(what: str, value: Any, states: Iterable[str]) -> str:
    """The one-string form that is kept in groups, e.g. ``"bf16"`` or ``"exp_avg:bf16,exp_avg_sq:fp32"``.

    A string survives every way of checkpointing; the same form is accepted from users.
    """
    if isinstance(value, str) and ":" in value:
        value = _by_tensor(value)
    if not isinstance(value, Mapping):
        return _dtype_name(what, value)
    known = list(states)
    for key in value:
        if key not in known:
            raise ValueError(f"{what} names the state {key!r}: this optimizer's states are {', '.join(known)}.")
    if not value:
        return "param"
    return ",".join(f"{key}:{_dtype_name(f'{what}[{key!r}]', item)}" for key, item in value.items())


def normal_rounding(what: str, value: Any, states: Iterable[str]) -> bool | str:
    """The form that is kept in groups: a bool, or for a mapping a string, e.g. ``"param:True,exp_avg:False"``."""
    if isinstance(value, str) and ":" in value:
        value = {k: {"true": True, "false": False}.get(flag.lower(), flag) for k, flag in _by_tensor(value).items()}
    if not isinstance(value, Mapping):
        return check_flag(what, value)
    known = ["param", *states]
    for key in value:
        if key not in known:
            raise ValueError(f"{what} names {key!r}: this optimizer's tensors are {', '.join(known)}.")
    flags = {key: check_flag(f"{what}[{key!r}]", flag) for key, flag in value.items()}
    if all(flags.values()):
        return True
    if len(flags) == len(known) and not any(flags.values()):
        return False
    return ",".join(f"{key}:{flag}" for key, flag in flags.items())


def rounding_of(normal: bool | str, names: Iterable[str]) -> bool | tuple[bool, ...]:
    """Which of the tensors of these names are rounded stochastically; ``normal`` as from :func:`normal_rounding`."""
    if isinstance(normal, bool):
        return normal
    flags = _by_tensor(normal)
    return tuple(flags.get(name) != "False" for name in names)


def state_dtype_of(normal: str, state: str, squared: bool, param_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which one state of a parameter is stored; ``normal`` as from :func:`normal_state_dtype`."""
    if ":" in normal:
        normal = _by_tensor(normal).get(state, "param")
    if normal != "param":
        return DTYPES[normal]
    return torch.bfloat16 if squared and param_dtype == torch.float16 else param_dtype


COMMON_CHECKS: dict[str, Check] = {
    "lr": check_nonnegative,
    "maximize": check_flag,
    "capturable": check_flag,
    "differentiable": check_flag,
    "weight_residual": _check_residual,
    "seed": _check_seed,
    "stream": _check_stream,
    "backend": one_of(*BACKENDS),
}


def reject_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """TypeError for a keyword that does not exist, with the nearest ones that do."""
    names = list(known)
    for key in given:
        if key not in names:
            near = get_close_matches(key, names, n=3, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else f" Known: {', '.join(sorted(names))}."
            raise TypeError(f"{owner} got an unexpected keyword argument {key!r}.{hint}")


def warn_of_misspelt(group: Iterable[str], known: Iterable[str], where: str) -> None:
    """A warning for a key of a group that is nearly the name of a hyper-parameter: it has no effect.

    Trainers put keys of their own into groups, so that others pass.
    """
    names = list(known)
    for key in group:
        # 0.86 lets pass "eps2" beside eps and "beta1" beside betas; one wrong letter in eight is above it.
        if key not in names and (near := get_close_matches(str(key), names, n=1, cutoff=0.86)):
            warnings.warn(f"{key!r}{where} has no effect: did you mean {near[0]!r}?", UserWarning, stacklevel=4)
