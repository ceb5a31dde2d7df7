"""The one Numba kernel, specialised by formula and dtypes, and its cache on disk."""

from __future__ import annotations

import hashlib
import types as python_types
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from subulp.backends.numba_lanes import Lanes
from subulp.numerics import ops
from subulp.numerics.noise import PHILOX_M0, PHILOX_M1, PHILOX_ROUNDS, PHILOX_W0, PHILOX_W1
from subulp.rules.rule import Rule

u32, u64, i64, f32 = np.uint32, np.uint64, np.int64, np.float32


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
    return a if (a > b or a != a) else b  # noqa: PLR0124


def _sign(x):  # type: ignore[no-untyped-def]
    return f32(1) if x > f32(0) else (f32(-1) if x < f32(0) else x)


BINDINGS = {
    ops.div: _div,
    ops.sqrt: _sqrt,
    ops.absolute: _absolute,
    ops.where: _where,
    ops.maximum: _maximum,
    ops.sign: _sign,
}


@intrinsic  # type: ignore[untyped-decorator]
def _take_next(typing_context: Any, counter: Any) -> Any:
    """Atomically adds one to ``counter[0]`` and returns the old value."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), emit


def _tuple_of(count: int, item: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
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


def _philox(seed, stream, step, block):  # type: ignore[no-untyped-def]
    """``subulp.numerics.noise.philox4x32`` of one block of keys."""
    c0, c1, c2 = u64(step & i64(0xFFFFFFFF)), u64(stream & i64(0xFFFFFFFF)), u64(stream >> i64(32))
    c3 = u64(block) & u64(0xFFFFFFFF)
    k0, k1 = u64(seed & u64(0xFFFFFFFF)), u64(seed >> u64(32))
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = u64(u64(PHILOX_M0) * c0), u64(u64(PHILOX_M1) * c2)
        c0, c1, c2, c3 = (
            u64(u64(p1 >> u64(32)) ^ c1 ^ k0),
            u64(p1 & u64(0xFFFFFFFF)),
            u64(u64(p0 >> u64(32)) ^ c3 ^ k1),
            u64(p0 & u64(0xFFFFFFFF)),
        )
        k0 = u64(k0 + u64(PHILOX_W0)) & u64(0xFFFFFFFF)
        k1 = u64(k1 + u64(PHILOX_W1)) & u64(0xFFFFFFFF)
    return u32(c0), u32(c1), u32(c2), u32(c3)


def _segment(addresses, position, count, index, stride, scalars, factor, seed, stream, step, scratch):  # type: ignore[no-untyped-def]
    """Updates ``count`` elements from storage ``position``; their global indices are ``index + j * stride``.

    All of them share ``index >> 32``.
    """
    if STOCHASTIC:
        last = i64(-1)
        r0 = r1 = r2 = r3 = u32(0)
        for slot in range(WRITTEN):
            word = WORDS[slot]
            high = index >> i64(32) if word >= 128 else index >> i64(33)
            block = i64(word >> 1) | (high << i64(8))
            if block != last:
                r0, r1, r2, r3 = philox(seed, stream, step, block)
                last = block
            scratch[0, 2 * slot] = r2 if word & 1 else r0
            scratch[0, 2 * slot + 1] = r3 if word & 1 else r1
    keys = keys_of(scratch, i64(0))
    done = i64(0)
    if PAIRED and stride == 1:
        if index & i64(1) and count > 0:
            update_one(addresses, position, index, scalars, factor, keys)
            done = i64(1)
        pairs = (count - done) >> i64(1)
        first = offset(addresses, position + done)
        counter = u32((index + done) >> i64(1))
        for j in range(pairs):
            even, odd = load_pair(first, j)
            new_even = formula(*arguments(even, scalars, factor))
            new_odd = formula(*arguments(odd, scalars, factor))
            store_pair(first, j, new_even, new_odd, even[0], odd[0], u32(counter + u32(j)), keys)
        done += pairs << i64(1)
    for j in range(done, count):
        update_one(addresses, position + j, index + j * stride, scalars, factor, keys)


def _update_one(addresses, position, index, scalars, factor, keys):  # type: ignore[no-untyped-def]
    (old,) = load_one(addresses, position)
    new = formula(*arguments(old, scalars, factor))
    store_one(addresses, position, new, old[0], index, keys)


def _kernel(pointers, layouts, chunks, counter, scalar_rows, rows, streams, steps, seed, factor):  # type: ignore[no-untyped-def]
    """Takes chunks until none is left.

    Shapes: ``pointers`` (tensors, columns); ``layouts`` (tensors, 1 + 2 * dims): base, sizes, strides, innermost last;
    ``chunks`` (chunks, 3): tensor, start, stop; ``scalar_rows`` (rows, scalars); the others one entry a tensor.
    """
    dims = (layouts.shape[1] - 1) >> 1
    scratch = np.zeros((1, 2 * WRITTEN), dtype=np.uint32)
    while True:
        c = take_next(counter)
        if c >= chunks.shape[0]:
            break
        t, position, stop = chunks[c, 0], chunks[c, 1], chunks[c, 2]
        addresses = pointers_of(pointers, t)
        scalars = scalars_of(scalar_rows, rows[t])
        inner, stride = layouts[t, dims], layouts[t, 2 * dims]
        while position < stop:
            rest = position // inner
            column = position - rest * inner
            index = layouts[t, 0] + column * stride
            for d in range(dims - 2, -1, -1):
                size = layouts[t, 1 + d]
                outer = rest // size
                index += (rest - outer * size) * layouts[t, 1 + dims + d]
                rest = outer
            count = min(inner - column, stop - position)
            left = ((((index >> i64(32)) + i64(1)) << i64(32)) - index + stride - i64(1)) // max(stride, i64(1))
            count = min(count, left)
            segment(addresses, position, count, index, stride, scalars, factor, seed, streams[t], steps[t], scratch)
            position += count


@intrinsic  # type: ignore[untyped-decorator]
def _bump(typing_context: Any, address: Any) -> Any:
    """Adds one to the fp32 at ``address``; returns the new value."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.FloatType().as_pointer())
        value = builder.fadd(builder.load(pointer), ir.FloatType()(1.0))
        builder.store(value, pointer)
        return value

    return types.float32(types.int64), emit


def _advance(pointers):  # type: ignore[no-untyped-def]
    result = np.empty(pointers.shape[0], dtype=np.int64)
    for i in range(pointers.shape[0]):
        result[i] = i64(_bump(pointers[i]))
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

    @intrinsic  # type: ignore[untyped-decorator]
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

    @intrinsic  # type: ignore[untyped-decorator]
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
            types.UniTuple(types.float32, written + reads), types.UniTuple(types.float32, max(scalars, 1)), types.float32
        ), emit

    return arguments


def _rebind(function: Callable[..., Any], done: dict[Any, Any]) -> Any:
    """The same code, compiled, with named functions and helper formulas replaced by their compiled twins."""
    if function in done:
        return done[function]
    if function in BINDINGS:
        twin = njit(error_model="numpy")(BINDINGS[function])
    else:
        # Without a module name numba could write the result to its cache but not read it back.
        names: dict[str, Any] = {"__name__": function.__module__}
        names |= {
            name: _rebind(value, done)
            for name in function.__code__.co_names
            if isinstance(value := function.__globals__.get(name), python_types.FunctionType)
        }
        twin = njit(error_model="numpy")(python_types.FunctionType(function.__code__, names, function.__name__))
    done[function] = twin
    return twin


def _specialise(function: Callable[..., Any], names: dict[str, Any]) -> Any:
    """The function with these globals added."""
    return python_types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, None, function.__closure__
    )


def _content_key(*parts: Any) -> int:
    """Changes whenever the sources, the versions or the specialisation do: numba itself looks at one file's date only."""
    digest = hashlib.blake2b(digest_size=7)
    here = Path(__file__)
    for path in (here, here.with_name("numba_lanes.py"), here.parent.parent / "numerics" / "noise.py"):
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


def _jit(function: Callable[..., Any], signature: Any, key: int) -> Any:
    """Compiles now, through the cache on disk where there is a writable place for it.

    The key is part of the name of the cache files. Numba numbers the files of one function without a lock, so that two
    processes which compile different specialisations at once could each end up with the other's.
    """
    function.__qualname__ = f"{function.__name__}_{key:x}"
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):
        return njit(signature, **options)(function)


@lru_cache(maxsize=None)
def kernel_for(rule: Rule, dtypes: tuple[str, ...], stochastic: bool) -> Any:
    """The compiled kernel of a rule over arrays of these formats ("bf16", "fp16", "fp32"), written ones first."""
    written = len(dtypes) - rule.reads
    lanes = Lanes(dtypes, written, stochastic, rule.raw, rule.keeps_nonfinite)
    inner = njit(error_model="numpy")
    names: dict[str, Any] = {
        "WRITTEN": written,
        "WORDS": lanes.words,
        "STOCHASTIC": stochastic and any(d != "fp32" for d in dtypes[:written]),
        "PAIRED": any(d != "fp32" for d in dtypes[:written]),
        "formula": _rebind(rule.formula, {}),
        "arguments": _arguments(written, rule.reads, rule.scalars),
        "load_one": lanes.load_one(),
        "load_pair": lanes.load_pair(),
        "store_one": lanes.store_one(),
        "store_pair": lanes.store_pair(),
        "offset": _offset(dtypes),
        "keys_of": _tuple_of(2 * written, types.uint32),
        "pointers_of": _tuple_of(len(dtypes), types.int64),
        "scalars_of": _tuple_of(max(rule.scalars, 1), types.float32),
        "philox": inner(_philox),
        "take_next": _take_next,
    }
    names["update_one"] = inner(_specialise(_update_one, names))
    names["segment"] = inner(_specialise(_segment, names))
    key = _content_key(_formula_key(rule.formula), dtypes, rule.reads, rule.scalars, stochastic, rule.raw, rule.keeps_nonfinite)
    return _jit(_specialise(_kernel, names), SIGNATURE, key)


@lru_cache(maxsize=None)
def advance_kernel() -> Any:
    """``advance(addresses)``: adds one to the fp32 counter at each address, returns the new values as int64."""
    return _jit(_specialise(_advance, {}), types.int64[::1](types.int64[::1]), _content_key("advance"))
