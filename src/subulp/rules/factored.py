"""Second moments kept as row and column means (Adafactor, CAME), and what they imply for an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from subulp.backends.matrices import Operand
from subulp.formula.compose import Part, part, quantity
from subulp.formula.factors import weighed
from subulp.formula.ops import div, maximum, sqrt
from subulp.formula.rule import Quantity, State
from subulp.passes import NONE, Passes


@part("x")
def square(u):  # type: ignore[no-untyped-def]
    return u * u


def inverse_root(v, least):  # type: ignore[no-untyped-def]
    return div(1.0, sqrt(maximum(v, least)))


@part("v")
def whole_moment(v, g, beta2, one_minus_beta2, floor):  # type: ignore[no-untyped-def]
    return beta2 * v + one_minus_beta2 * (g * g + floor)


@part("u")
def whole_direction(v, g, least):  # type: ignore[no-untyped-def]
    return inverse_root(v, least) * g


@part("u", by_row=["r"], by_col=["c"])
def clamped_direction(g, r, c, least):  # type: ignore[no-untyped-def]
    return inverse_root(r * c, least) * g


OF_GRADIENT = quantity(square.of(u="g").to("x"))
WHOLE = (whole_moment, whole_direction)
"""The parts of an update by a moment of the parameter's shape."""


def factored_states(name: str) -> tuple[State, ...]:
    """Row and column means, for parameters of two dimensions or more."""
    row, col = (f"{axis}_var" if name == "exp_avg_sq" else None for axis in ("row", "col"))  # in torch.optim.Adafactor
    return (
        State(f"{name}_row", True, True, averaged=-1, alias=row),
        State(f"{name}_col", True, True, averaged=-2, alias=col),
    )


def whole_state(name: str) -> State:
    """The second moment of a parameter that is not factored; in fp32, as the factors, since such parameters are small."""
    return State(name, True, True, alias="variance")


@dataclass(frozen=True)
class Moments:
    """What second moments say of an update: the parts that give ``u``, and what these take."""

    parts: tuple[Part, ...]
    operands: dict[str, Operand]


def factored(
    passes: Passes,
    name: str,
    beta2: Operand,
    floor: float,
    clamp: float | None = None,
    scale: Operand = 1.0,
    correction: Operand = 1.0,
    what: Quantity = OF_GRADIENT,
    operands: Mapping[str, Operand] = NONE,
    states: Mapping[str, str] = NONE,
) -> tuple[Tensor, Tensor]:
    """Updates the second moment ``name`` of matrices; returns the factors by row and by column of ``1 / sqrt(v)``.

    ``v = beta2 * v + (1 - beta2) * (scale * squares + floor)``, with squares of the gradient or else ``what`` gives, from
    ``states`` and ``operands``. Only the means R over the last and C over the last but one dimension are kept, and ``v_ij``
    is taken as ``R_i * C_j / mean(R)`` (Shazeer and Stern 2018, section 3). ``correction`` divides R and C (and so v) where
    they are used. With ``clamp`` the factors are those of v: mean(R) is at least this, as in ``torch.optim.Adafactor``.
    """
    row, col = passes.sum(what, ("rows", "cols"), operands, states)
    kept = []
    for key, total, over, dim in (("row", row, "rows", -1), ("col", col, "cols", -2)):
        share, gain = passes.spread(beta2, over), passes.spread(scale, over)
        mean = total / passes.kind.extent(dim, over)
        new = share * passes.packed(f"{name}_{key}") + (1 - share) * (gain * mean + floor)
        kept.append(passes.unpack(f"{name}_{key}", new))
    exact_row, exact_col = kept
    rows = passes.kind.extent(-2, "matrices")
    mean_row = passes.sum_rows(f"{name}_row") / rows
    if clamp is not None:
        return exact_row / passes.spread_matrices(mean_row.clamp(min=clamp), "rows"), exact_col
    by_row = (exact_row / passes.spread_matrices(mean_row, "rows")).rsqrt()
    return by_row, (exact_col / passes.spread(correction, "cols")).rsqrt()


def second_moments(passes: Passes, name: str, beta2: Operand, floor: float, clamp: float | None = None) -> Moments:
    """:func:`factored` of matrices; of other parameters, whose moment is updated with the rest, what its parts take."""
    if len(passes.kind.shapes[0]) < 2:
        operands = {"beta2": beta2, "one_minus_beta2": 1 - beta2, "floor": floor, "least": (clamp or 0.0) ** 2}
        return Moments(WHOLE, operands)
    r, c = factored(passes, name, beta2, floor, clamp)
    if clamp is None:
        return Moments((weighed,), {"r": r, "c": c})
    return Moments((clamped_direction,), {"r": r, "c": c, "least": clamp * clamp})


def size_of_update(passes: Passes, moments: Moments, name: str) -> Tensor:
    """The root mean square of u over each whole parameter."""
    reads = ("v", "g") if moments.parts is WHOLE else ("g",)
    what = quantity(*moments.parts, square, reads=reads)
    (total,) = passes.sum(what, operands=moments.operands, states={"v": name})
    return (total / passes.kind.numel).sqrt()
