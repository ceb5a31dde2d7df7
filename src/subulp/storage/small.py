"""Rounding to floating-point formats with a smaller exponent than fp32's: fp16 and float8.

The dropped part has up to 140 bits. It is aligned to a 32-bit fraction and a 32-bit draw is added, so that ``P(up)`` is exact
to ``2**-32`` ulp (exactly unbiased wherever the fraction has at most 32 bits).
"""

# mypy: disable-error-code="no-untyped-def"

from subulp.formula.ops import bits_of, where


def aligned(magnitude, mantissa_bits, min_exponent):
    """The magnitude's bits in units of the format's last place: whole ones, and 32 bits of fraction."""
    exponent = magnitude >> 23
    mantissa = where(exponent > 0, (magnitude & 0x7FFFFF) | 0x800000, magnitude)
    exponent = where(exponent > 0, exponent, 1)
    shift = where(exponent < min_exponent, min_exponent - exponent, 0) + (23 - mantissa_bits)
    short = where(shift < 32, shift, 31)
    long = where(shift < 32, 32, shift) - 32
    long = where(long < 32, long, 31)
    whole = where(shift < 32, mantissa >> short, 0)
    fraction = where(shift < 32, mantissa << (32 - short), mantissa >> long)
    return whole, fraction, where(exponent > min_exponent, exponent - min_exponent, 0) << mantissa_bits


def to_neighbour(x, draw, mantissa_bits, min_exponent, max_code, inf_code, nan_code, sign_shift):
    """``x`` rounded stochastically.

    ``min_exponent`` is fp32's biased exponent of the smallest normal number; the codes are the magnitude bits of the largest
    finite number, of infinity (of NaN where there is none) and of NaN.
    """
    bits = bits_of(x)
    magnitude = bits & 0x7FFFFFFF
    whole, fraction, base = aligned(magnitude, mantissa_bits, min_exponent)
    carry = where(fraction + draw < fraction, 1, 0)
    code = whole + carry + base
    code = where(code < max_code, code, max_code)
    code = where(magnitude == 0x7F800000, inf_code, code)
    code = where(magnitude > 0x7F800000, nan_code, code)
    return code | ((bits & 0x80000000) >> sign_shift)


def to_nearest(x, mantissa_bits, min_exponent, max_code, over_code, inf_code, nan_code, sign_shift):
    """``x`` rounded to nearest, ties to even. ``over_code``: what follows ``max_code`` in the format."""
    bits = bits_of(x)
    magnitude = bits & 0x7FFFFFFF
    whole, fraction, base = aligned(magnitude, mantissa_bits, min_exponent)
    # Half of the last place, less one step where the whole is even: a tie carries to the even neighbour.
    tie = fraction + (0x7FFFFFFF + (whole & 1))
    code = whole + where(tie < fraction, 1, 0) + base
    code = where(code <= max_code, code, over_code)
    code = where(magnitude == 0x7F800000, inf_code, code)
    code = where(magnitude > 0x7F800000, nan_code, code)
    return code | ((bits & 0x80000000) >> sign_shift)
