"""Rounding to floating-point formats with a smaller exponent than fp32's: fp16 and float8.

A magnitude is brought to units of the format's last place in its binade by a power of two, which changes no bit of it. Its
whole part and 32 bits of its fraction then meet a 32-bit draw, so that ``P(up)`` is exact to ``2**-32`` ulp (exactly unbiased
wherever the fraction has at most 32 bits).
"""

# mypy: disable-error-code="no-untyped-def"

from subulp.formula.ops import absolute, bits_of, high_sum, number_of, where

INFINITY = float("inf")


def binade(magnitude, min_exponent):
    """The exponent bits of a magnitude, those of the smallest normal number for what is smaller."""
    exponent = bits_of(magnitude) & 0x7F800000
    return where(exponent > min_exponent << 23, exponent, min_exponent << 23)


def to_neighbour(x, draw, mantissa_bits, min_exponent, largest, inf_code, nan_code, sign_shift):
    """``x`` rounded stochastically.

    ``min_exponent`` is fp32's biased exponent of the smallest normal number; the codes are the magnitude bits of infinity (of
    NaN where there is none) and of NaN.
    """
    magnitude = absolute(x)
    cut = where(magnitude < largest, magnitude, largest)
    exponent = binade(cut, min_exponent)
    steps = cut * number_of(((286 + mantissa_bits) << 23) - exponent)  # of 2**-32 of the last place
    code = high_sum(steps, draw) + ((exponent >> (23 - mantissa_bits)) - (min_exponent << mantissa_bits))
    code = where(magnitude < INFINITY, code, where(x == x, inf_code, nan_code))
    return code | ((bits_of(x) & 0x80000000) >> sign_shift)


def to_nearest(x, mantissa_bits, min_exponent, over_code, inf_code, nan_code, sign_shift):
    """``x`` rounded to nearest, ties to even. ``over_code``: what there is instead of larger codes."""
    magnitude = absolute(x)
    exponent = binade(magnitude, min_exponent)
    units = magnitude * number_of(((254 + mantissa_bits) << 23) - exponent)
    # That sum has units of 1, so the addition rounds to nearest, ties to even.
    whole = bits_of(units + 2.0**23) - 0x4B000000
    code = whole + ((exponent >> (23 - mantissa_bits)) - (min_exponent << mantissa_bits))
    code = where(code < over_code, code, over_code)
    code = where(magnitude < INFINITY, code, where(x == x, inf_code, nan_code))
    return code | ((bits_of(x) & 0x80000000) >> sign_shift)
