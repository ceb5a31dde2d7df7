"""Parts that several optimizers share, see ``subulp.formula.compose``.

``p`` is the parameter, ``g`` its gradient, ``u`` what is subtracted from it, ``m`` and ``v`` first and second moments.
"""

# mypy: disable-error-code="no-untyped-def"

from subulp.formula.compose import part
from subulp.formula.ops import maximum, sign


@part("g")
def coupled(g, p, decay):
    """Decay in the gradient, as L2 regularisation."""
    return g + decay * p


@part("m")
def interpolated(m, g, one_minus_beta1):
    return m + one_minus_beta1 * (g - m)


@part("m")
def averaged(m, u, beta1, share):
    return beta1 * m + share * u


@part("v")
def second_moment(v, g, beta2, one_minus_beta2):
    return beta2 * v + one_minus_beta2 * g * g


@part("v_max")
def largest(v_max, v):
    return maximum(v_max, v)


@part("u")
def signed(u):
    return sign(u)


@part("u")
def scaled(u, scale):
    return scale * u


@part("p")
def subtracted(p, u):
    return p - u


@part("p")
def decayed(p, u, decay):
    """Decoupled decay, inside the one rounding (OneTrainer issue #996)."""
    return p - (decay * p + u)
