"""Formulas as Triton functions: the same code under ``triton.jit``, the named functions bound to instructions.

Only builtin functions of ``triton.language`` are used: those that Triton itself writes under ``@jit`` fail in the
interpreter if Triton was imported before ``TRITON_INTERPRET`` was set.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton
import triton.language as tl

from subulp.formula import ops
from subulp.formula.bind import bind
from subulp.formula.ops import PRIMITIVES


@triton.jit
def _div(a, b):
    return tl.div_rn(a, b)


@triton.jit
def _sqrt(x):
    return tl.sqrt_rn(x)


@triton.jit
def _absolute(x):
    return tl.abs(x)


@triton.jit
def _where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def _bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _number_of(word):
    return word.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _high_product(a, b):
    return tl.umulhi(a, tl.full((), b, tl.uint32))


@triton.jit
def _high_sum(x, word):
    return ((x.to(tl.uint64) + word.to(tl.uint64)) >> 32).to(tl.uint32)


@triton.jit
def _half_of(x):
    return x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _number_of_half(word):
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


_BINDINGS: dict[Callable[..., Any], Any] = {
    ops.div: _div,
    ops.sqrt: _sqrt,
    ops.absolute: _absolute,
    ops.where: _where,
    ops.bits_of: _bits_of,
    ops.number_of: _number_of,
    ops.high_product: _high_product,
    ops.high_sum: _high_sum,
    ops.half_of: _half_of,
    ops.number_of_half: _number_of_half,
    # The interpreter knows the former only as an attribute of a module.
    ops.repeat: tl.static_range if isinstance(_div, triton.JITFunction) else range,
}

if set(_BINDINGS) != set(PRIMITIVES):
    raise ImportError("backends/triton/bindings.py does not bind the primitives of formula/ops.py.")


@cache
def jitted(function: Callable[..., Any]) -> Any:
    """The formula under ``triton.jit``."""
    return bind(function, _BINDINGS, triton.jit, tl.constexpr, {"tl": tl})
