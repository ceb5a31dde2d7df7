"""Updates of a matrix with a factor for each row and each column (Adafactor, CAME)."""

# mypy: disable-error-code="no-untyped-def"

from subulp.formula.compose import part


def product(g, r, c):
    """``g / sqrt(v)`` where ``v`` is an outer product; the factors first, as one rounding order for all layouts."""
    return r * c * g


def deviation(g, r, c, m, factor):
    """How far the update is from its average."""
    return product(g, r, c) - m * factor


weighed = part("u", by_row=["r"], by_col=["c"])(product)


@part("w", by_row=["s"], by_col=["d"])
def confidence(s, d):
    return s * d
