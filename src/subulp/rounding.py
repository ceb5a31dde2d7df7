"""Stochastic rounding of tensors: the primitives behind every store, for use on their own.

Each function computes in fp32 and rounds every element once. The draw of an element is a function of ``(seed, stream,
step, offset + row-major index)``: the same on every device and for every memory format. Give each tensor its own
``stream`` and each use its own ``step``, or their rounding errors are correlated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subulp.backends import registry
from subulp.backends.bucket import single
from subulp.formula.ops import div
from subulp.formula.rule import Rule
from subulp.numerics.views import flat_views
from subulp.options import as_real, check_counter
from subulp.storage import ROUNDED


def _copy(p, source):  # type: ignore[no-untyped-def]
    return (source,)


def _add(p, other, alpha):  # type: ignore[no-untyped-def]
    return (p + alpha * other,)


def _addcdiv(p, numerator, denominator, value):  # type: ignore[no-untyped-def]
    return (p + value * div(numerator, denominator),)


def _lerp(p, end, weight):  # type: ignore[no-untyped-def]
    return (p + weight * (end - p),)


COPY = Rule(_copy, reads=("source",), keeps_nonfinite=False, raw=True)
ADD = Rule(_add, reads=("other",), keeps_nonfinite=False)
ADDCDIV = Rule(_addcdiv, reads=("numerator", "denominator"), keeps_nonfinite=False)
LERP = Rule(_lerp, reads=("end",), keeps_nonfinite=False)

_FLOATS = (torch.float32, torch.float64, *ROUNDED)


def round_stochastic(
    x: Tensor, dtype: torch.dtype, *, seed: int, stream: int = 0, step: int = 0, offset: int = 0
) -> Tensor:
    """``x`` rounded stochastically to ``dtype``, as a new tensor.

    ``E[result] == x`` for every finite ``x`` in range: exactly for bfloat16 (16 random bits decide 16 dropped bits), to
    ``2**-32`` ulp for the others. NaN stays NaN with its sign, infinities stay (NaN in float8_e4m3fn, which has none),
    finite values stay finite (they saturate at the largest one), representable values are unchanged.

    Args:
        x: a floating-point tensor of any shape and strides. fp64 is first rounded to fp32 (to nearest).
        dtype: torch.bfloat16, torch.float16, torch.float8_e4m3fn or torch.float8_e5m2. torch.float32 only converts.
        seed: 0 <= seed < 2**64.
        stream: 0 <= stream < 2**63, one for each tensor that is rounded.
        step: 0 <= step < 2**32, one for each time that it is rounded.
        offset: global index of the first element, where ``x`` is a piece of a larger tensor.

    Raises:
        TypeError, ValueError: a dtype that is not listed, or a counter out of its range.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}: pass a tensor, e.g. torch.tensor(x).")
    if dtype not in ROUNDED and dtype != torch.float32:
        raise ValueError(f"dtype={dtype}: stochastic rounding targets {_names(ROUNDED)} (and torch.float32, exact).")
    target = torch.empty_like(x, dtype=dtype, requires_grad=False)
    return copy_stochastic_(target, x, seed=seed, stream=stream, step=step, offset=offset)


def copy_stochastic_(
    target: Tensor, source: Tensor, *, seed: int, stream: int = 0, step: int = 0, offset: int = 0
) -> Tensor:
    """``target.copy_(source)``, rounded stochastically. Arguments and errors as :func:`round_stochastic`."""
    return _run(COPY, target, [source], (), seed, stream, step, offset)


def add_stochastic_(
    input: Tensor,
    other: Tensor | float,
    *,
    alpha: float = 1.0,
    seed: int,
    stream: int = 0,
    step: int = 0,
    offset: int = 0,
) -> Tensor:
    """``input += alpha * other`` in fp32, rounded stochastically: the semantics of ``torch.add(input, other, alpha=)``.

    Arguments and errors as :func:`round_stochastic`.
    """
    return _run(ADD, input, [_operand(other, input)], (as_real("alpha", alpha),), seed, stream, step, offset)


def addcdiv_stochastic_(
    input: Tensor,
    tensor1: Tensor,
    tensor2: Tensor,
    *,
    value: float = 1.0,
    seed: int,
    stream: int = 0,
    step: int = 0,
    offset: int = 0,
) -> Tensor:
    """``input += value * tensor1 / tensor2`` in fp32, rounded stochastically: the semantics of ``torch.addcdiv``.

    Arguments and errors as :func:`round_stochastic`.
    """
    return _run(ADDCDIV, input, [tensor1, tensor2], (as_real("value", value),), seed, stream, step, offset)


def lerp_stochastic_(
    input: Tensor, end: Tensor, weight: float, *, seed: int, stream: int = 0, step: int = 0, offset: int = 0
) -> Tensor:
    """``input += weight * (end - input)`` in fp32, rounded stochastically: the semantics of ``torch.lerp``.

    A moving average with decay 0.9999 is ``lerp_stochastic_(ema, value, 1e-4, ...)``. Arguments and errors as
    :func:`round_stochastic`.
    """
    return _run(LERP, input, [end], (as_real("weight", weight),), seed, stream, step, offset)


def _run(
    rule: Rule,
    target: Tensor,
    reads: list[Tensor],
    scalars: tuple[float, ...],
    seed: int,
    stream: int,
    step: int,
    offset: int,
) -> Tensor:
    for name, value, bits in (("seed", seed, 64), ("stream", stream, 63), ("step", step, 32), ("offset", offset, 55)):
        check_counter(name, value, bits)
    _check_dtypes(rule, target, reads)
    with torch.no_grad():
        reads = [_like(t.detach(), target) for t in reads]
        views = flat_views([target.detach()], reads, offset)
        if views.written[0].numel() > 0:
            bucket = single(views, stream, step, scalars)
            registry.choose("auto", bucket.device, bucket.dtypes).run(rule, bucket, seed=seed, stochastic=True)
    return target


def _check_dtypes(rule: Rule, target: Tensor, reads: list[Tensor]) -> None:
    for t in (target, *reads):
        if not isinstance(t, Tensor):
            raise TypeError(f"{t!r} is a {type(t).__name__}: pass a tensor, e.g. torch.tensor(...) of it.")
        if t.dtype not in _FLOATS and not t.is_complex():
            raise TypeError(
                f"A tensor is {t.dtype}: stochastic rounding works on {_names(_FLOATS)} and complex tensors."
            )
    if any(t.is_complex() != target.is_complex() for t in reads):
        raise TypeError("Real and complex tensors are mixed: use torch.view_as_real on the complex ones.")
    if target.is_complex() and rule is ADDCDIV:
        raise TypeError("addcdiv of complex tensors is not elementwise in their parts: it is not supported.")


def _operand(other: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(other, Tensor):
        return other
    dtype = like.dtype if like.is_complex() else torch.float32
    return torch.tensor(as_real("other", other), dtype=dtype, device=like.device)


def _like(t: Tensor, target: Tensor) -> Tensor:
    """The tensor broadcast to the target's shape, on its device."""
    try:
        return t.to(target.device).expand_as(target)
    except RuntimeError:
        raise ValueError(
            f"A tensor of shape {tuple(t.shape)} does not broadcast to the target's {tuple(target.shape)}."
        ) from None


def _names(dtypes: object) -> str:
    return ", ".join(str(d) for d in dtypes)  # type: ignore[attr-defined]
