"""The one Numba kernel, specialised by formula and dtypes, and its cache on disk."""

# mypy: disable-error-code="call-arg, unreachable"

from __future__ import annotations

import hashlib
import types as python_types
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from subulp.backends.numba import body as numba_body
from subulp.backends.numba.lanes import Lanes
from subulp.formula import ops
from subulp.formula.rule import Rule

i64, f32 = np.int64, np.float32


# The named functions of formulas on fp32 scalars. Numba's division and square root are correctly rounded.


def _div(a, b):  # type: ignore[no-untyped-def]
    return a / b


def _sqrt(x):  # type: ignore[no-untyped-def]
    return np.sqrt(x)


def _absolute(x):  # type: ignore[no-untyped-def]
    return abs(x)


def _where(condition, a, b):  # type: ignore[no-untyped-def]
    return f32(a) if condition else f32(b)


def _maximum(a, b):  # type: ignore[no-untyped-def]
    return a if (a > b or a != a) else b


def _sign(x):  # type: ignore[no-untyped-def]
    return f32(1) if x > f32(0) else (f32(-1) if x < f32(0) else x)


BINDINGS: dict[Any, Any] = {
    ops.div: _div,
    ops.sqrt: _sqrt,
    ops.absolute: _absolute,
    ops.where: _where,
    ops.maximum: _maximum,
    ops.sign: _sign,
}


@intrinsic
def _take_next(typing_context: Any, counter: Any) -> Any:
    """Atomically adds one to ``counter[0]`` and returns the old value."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), emit


def _tuple_of(count: int, item: Any) -> Any:
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


def _offset(dtypes: tuple[str, ...]) -> Any:
    count = len(dtypes)
    tuple_type = types.UniTuple(types.int64, count)

    @intrinsic
    def offset(typing_context: Any, addresses: Any, position: Any) -> Any:
        """The addresses of element ``position``."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = []
            for c, dtype in enumerate(dtypes):
                shifted = builder.shl(args[1], args[1].type(2 if dtype == "fp32" else 1))
                values.append(builder.add(builder.extract_value(args[0], c), shifted))
            return context.make_tuple(builder, tuple_type, values)

        return tuple_type(tuple_type, types.int64), emit

    return offset


def _arguments(written: int, reads: int, scalars: int) -> Any:
    count = written + reads + scalars
    result = types.UniTuple(types.float32, count)

    @intrinsic
    def arguments(typing_context: Any, values: Any, scalar_values: Any, factor: Any) -> Any:
        """The formula's arguments: target, reads (the first times ``factor``), states, scalars."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            columns = [builder.extract_value(args[0], c) for c in range(written + reads)]
            read = columns[written:]
            read[:1] = [builder.fmul(read[0], args[2])] if read else []
            ordered = [columns[0], *read, *columns[1:written]]
            ordered += [builder.extract_value(args[1], c) for c in range(scalars)]
            return context.make_tuple(builder, result, ordered)

        return result(
            types.UniTuple(types.float32, written + reads),
            types.UniTuple(types.float32, max(scalars, 1)),
            types.float32,
        ), emit

    return arguments


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    """The same code, compiled, with named functions and helper formulas replaced by their compiled twins.

    Its key is of its own code, so that all kernels of a process share it: typing it again would be a third of their time.
    """
    if function in BINDINGS:
        return _compiled(BINDINGS[function])
    names = {
        name: _compiled(value)
        for name in function.__code__.co_names
        if isinstance(value := function.__globals__.get(name), python_types.FunctionType)
    }
    # A Python number is fp64 or int64 to Numba, and would lift the whole expression to fp64.
    constants = tuple(f32(c) if type(c) in (int, float) else c for c in function.__code__.co_consts)
    typed = python_types.FunctionType(function.__code__.replace(co_consts=constants), function.__globals__)
    return _inner(typed, names, _content_key(_formula_key(function)))


@cache
def _philox() -> Any:
    return _inner(numba_body.philox, {}, _content_key("philox"))


def _inner(function: Callable[..., Any], names: dict[str, Any], key: int) -> Any:
    """A function compiled into the kernel.

    The key goes into its symbol. Numba numbers symbols by process, so libraries that two processes have cached may use one
    name for different code; loaded together, one would call the other's.
    """
    return njit(error_model="numpy")(_specialise(function, names, key))


def _specialise(function: Callable[..., Any], names: dict[str, Any], key: int) -> Any:
    """A twin of the function with these globals, its qualified name made unique by the key."""
    twin = python_types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
    twin.__qualname__ = f"{function.__name__}_{key:x}"
    return twin


def _content_key(*parts: Any) -> int:
    """Changes whenever the sources, the versions or the specialisation do: numba itself looks at one file's date only."""
    digest = hashlib.blake2b(digest_size=7)
    here = Path(__file__)
    noise = here.parents[2] / "formula" / "noise.py"
    for path in (here, here.with_name("body.py"), here.with_name("lanes.py"), noise):
        digest.update(path.read_bytes())
    for part in (numba.__version__, llvmlite.__version__, *parts):
        digest.update(repr(part).encode())
    return int.from_bytes(digest.digest(), "little")


def _formula_key(function: Callable[..., Any]) -> Any:
    code = function.__code__
    helpers = [
        _formula_key(value)
        for name in code.co_names
        if isinstance(value := function.__globals__.get(name), python_types.FunctionType) and value not in BINDINGS
    ]
    return code.co_code, code.co_consts, code.co_names, helpers


def cached_jit(
    function: Callable[..., Any], signature: Any, *key: str, inner: Sequence[Callable[..., Any]] = (), **options: Any
) -> Any:
    """A function compiled now, cached under its code and the key. ``options`` do not reach the ``inner`` functions.

    An inner function may call those before it.
    """
    codes = [(f.__code__.co_code, f.__code__.co_consts, f.__code__.co_names) for f in (function, *inner)]
    number = _content_key(*codes, *key)
    names: dict[str, Any] = {}
    for f in inner:
        names[f.__name__] = _inner(f, dict(names), number)
    return _jit(_specialise(function, names, number), signature, **options)


def _jit(function: Callable[..., Any], signature: Any, **more: Any) -> Any:
    """Compiles now, through the cache on disk where there is a writable place for it.

    The function's name, and so that of its cache files, must be unique: Numba numbers the files of one function without a
    lock, and processes that compile different specialisations at once could end up with each other's.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", **more}
    try:
        return njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):
        return njit(signature, **options)(function)


def kernel_for(rule: Rule, dtypes: tuple[str, ...], stochastic: tuple[bool, ...]) -> Any:
    """The compiled kernel of a rule over arrays of these formats ("bf16", "fp16", "fp32"), written ones first.

    ``stochastic`` says of each written array how it is rounded; of an fp32 one it says nothing.
    """
    stochastic = tuple(flag and dtype != "fp32" for flag, dtype in zip(stochastic, dtypes, strict=False))
    return _kernel(rule, dtypes, stochastic)


@cache
def _kernel(rule: Rule, dtypes: tuple[str, ...], stochastic: tuple[bool, ...]) -> Any:
    written = len(dtypes) - rule.reads
    key = _content_key(
        _formula_key(rule.formula), dtypes, rule.reads, rule.scalars, stochastic, rule.raw, rule.keeps_nonfinite
    )
    lanes = Lanes(dtypes, written, stochastic, rule.raw, rule.keeps_nonfinite)
    names: dict[str, Any] = {
        "WRITTEN": written,
        "WORDS": lanes.words,
        "STOCHASTIC": any(stochastic),
        "PAIRED": any(d != "fp32" for d in dtypes[:written]),
        "formula": _compiled(rule.formula),
        "arguments": _arguments(written, rule.reads, rule.scalars),
        "load_one": lanes.load_one(),
        "load_pair": lanes.load_pair(),
        "store_one": lanes.store_one(),
        "store_pair": lanes.store_pair(),
        "offset": _offset(dtypes),
        "keys_of": _tuple_of(2 * written, types.uint32),
        "pointers_of": _tuple_of(len(dtypes), types.int64),
        "scalars_of": _tuple_of(max(rule.scalars, 1), types.float32),
        "philox": _philox(),
        "take_next": _take_next,
    }
    names["update_one"] = _inner(numba_body.update_one, names, key)
    names["segment"] = _inner(numba_body.segment, names, key)
    return _jit(_specialise(numba_body.kernel, names, key), SIGNATURE)


@cache
def advance_kernel() -> Any:
    """``advance(addresses)``: adds one to the fp64 counters at the first row; returns them, and the int64 at the second."""
    return _jit(_specialise(_advance, {}, _content_key("advance")), types.int64[:, ::1](types.int64[:, ::1]))
