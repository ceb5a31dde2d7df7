"""The one Numba kernel, specialised by formula and dtypes, and its cache on disk."""

# mypy: disable-error-code="call-arg, unreachable"

from __future__ import annotations

import hashlib
import types as python_types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from subulp.backends.numba import body
from subulp.backends.numba.lanes import Lanes
from subulp.formula.bind import key_of
from subulp.formula.ops import PRIMITIVES
from subulp.formula.rule import Rule
from subulp.storage.codec import Codec

i64 = np.int64


@intrinsic
def take_next(typing_context: Any, counter: Any) -> Any:
    """Atomically adds one to ``counter[0]`` and returns the old value."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), emit


def tuple_of(count: int, item: Any) -> Any:
    @intrinsic
    def row(typing_context: Any, array: Any, i: Any) -> Any:
        """Row i of a 2-d C-contiguous array, as a tuple."""
        result = types.UniTuple(item, count)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            base = builder.mul(args[1], args[1].type(count))
            values = [builder.load(builder.gep(data, [builder.add(base, base.type(c))])) for c in range(count)]
            return context.make_tuple(builder, result, values)

        return result(array, types.int64), emit

    return row


@intrinsic
def _bump(typing_context: Any, address: Any) -> Any:
    """Adds one to the fp64 at ``address``; returns the new value."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.DoubleType().as_pointer())
        value = builder.fadd(builder.load(pointer), ir.DoubleType()(1.0))
        builder.store(value, pointer)
        return value

    return types.float64(types.int64), emit


@intrinsic
def _integer_at(typing_context: Any, address: Any) -> Any:
    """The int64 at ``address``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), emit


def _advance(pointers):  # type: ignore[no-untyped-def]
    result = np.empty((2, pointers.shape[1]), dtype=np.int64)
    for i in range(pointers.shape[1]):
        result[0, i] = i64(_bump(pointers[0, i]))
        result[1, i] = _integer_at(pointers[1, i])
    return result


SIGNATURE = types.void(
    types.int64[:, ::1],
    types.int64[:, ::1],
    types.int64[:, ::1],
    types.int64[::1],
    types.float32[:, ::1],
    types.int64[::1],
    types.int64[::1],
    types.int64[::1],
    types.uint64,
    types.float32,
)


def inner(function: Callable[..., Any], names: dict[str, Any], key: int) -> Any:
    """A function compiled into the kernel.

    The key goes into its symbol. Numba numbers symbols by process, so libraries that two processes have cached may use one
    name for different code; loaded together, one would call the other's.
    """
    return njit(error_model="numpy")(specialise(function, names, key))


def specialise(function: Callable[..., Any], names: dict[str, Any], key: int) -> Any:
    """A twin of the function with these globals, its qualified name made unique by the key."""
    twin = python_types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
    twin.__qualname__ = f"{function.__name__}_{key:x}"
    return twin


@cache
def _sources() -> bytes:
    """What every kernel is made of, beside its rule: the digest of these files."""
    package = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=16)
    for folder in (Path(__file__).parent, package / "formula", package / "storage"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.digest()


def content_key(*parts: Any) -> int:
    """Changes whenever the sources, the versions or the specialisation do: numba itself looks at one file's date only."""
    digest = hashlib.blake2b(_sources(), digest_size=7)
    for part in (numba.__version__, llvmlite.__version__, *parts):
        digest.update(repr(part).encode())
    return int.from_bytes(digest.digest(), "little")


def compiled(function: Callable[..., Any], signature: Any, **more: Any) -> Any:
    """Compiles now, through the cache on disk where there is a writable place for it.

    The function's name, and so that of its cache files, must be unique: Numba numbers the files of one function without a
    lock, and processes that compile different specialisations at once could end up with each other's.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", **more}
    try:
        return njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):
        return njit(signature, **options)(function)


def kernel_for(rule: Rule, codecs: tuple[Codec, ...], stochastic: tuple[bool, ...], factor: float = 1.0) -> Any:
    """The compiled kernel of a rule over arrays of these formats, written ones first.

    ``stochastic`` says of each written array how it is rounded; where every number is exact it says nothing. One kernel
    serves every factor, since 1.0 changes nothing, except a NaN that is only copied: a raw rule has one for 1.0 and one for
    others.
    """
    stochastic = tuple(flag and codec.draw_bits > 0 for flag, codec in zip(stochastic, codecs, strict=False))
    return _kernel(rule, codecs, stochastic, not rule.raw or factor != 1.0)


@cache
def _kernel(rule: Rule, codecs: tuple[Codec, ...], stochastic: tuple[bool, ...], scaled: bool) -> Any:
    lanes = Lanes(rule, codecs, stochastic, scaled)
    formats = [(codec.name, codec.bits, codec.draw_bits) for codec in codecs]
    formula = key_of(rule.formula, dict.fromkeys(PRIMITIVES))
    key = content_key(formula, formats, lanes.scalars, stochastic, scaled, rule.raw, rule.keeps_nonfinite)
    return compiled(specialise(body.kernel, kernel_names(lanes, key), key), SIGNATURE)


def kernel_names(lanes: Lanes, key: int) -> dict[str, Any]:
    """What the functions of ``body.py`` take for a specialisation."""
    names: dict[str, Any] = {
        "PAIRED": lanes.paired,
        "update_one": lanes.update_one(),
        "update_pair": lanes.update_pair(),
        "keys": lanes.keys(),
        "offset": lanes.offset(),
        "pointers_of": tuple_of(len(lanes.bits), types.int64),
        "scalars_of": tuple_of(max(lanes.scalars, 1), types.float32),
        "take_next": take_next,
    }
    names["keys_at"] = inner(body.keys_at, names, key)
    names["segment"] = inner(body.segment, names, key)
    names["walk"] = inner(body.walk, names, key)
    return names


@cache
def advance_kernel() -> Any:
    """``advance(addresses)``: adds one to the fp64 counters at the first row; returns them, and the int64 at the second."""
    return compiled(specialise(_advance, {}, content_key("advance")), types.int64[:, ::1](types.int64[:, ::1]))
