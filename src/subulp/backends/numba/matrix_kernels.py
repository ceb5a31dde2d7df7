"""The Numba kernels for stacks of matrices, specialised by formula and formats."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from subulp.backends.numba import body, matrix_body
from subulp.backends.numba.kernel import (
    compiled,
    content_key,
    inner,
    kernel_names,
    specialise,
    take_next,
    tuple_of,
)
from subulp.backends.numba.lanes import Lanes, Memory
from subulp.backends.numba.trace import FLOAT, WORD, Number, Word, traced
from subulp.formula.bind import key_of
from subulp.formula.ops import PRIMITIVES
from subulp.formula.rule import Quantity, Rule
from subulp.formula.sums import LANES, PIECE
from subulp.storage import CODECS
from subulp.storage.codec import Codec
from subulp.storage.element import value_of

_INDEX = ir.IntType(64)
_DOUBLE = ir.DoubleType()
FP32 = next(codec for codec in CODECS.values() if codec.name == "fp32")

_ROW, _TABLE, _VECTOR = types.int64[::1], types.int64[:, ::1], types.float64[::1]


@cache
def factored_kernel(rule: Rule, codecs: tuple[Codec, ...], stochastic: tuple[bool, ...]) -> Any:
    """The kernel of a rule with factors; ``codecs`` are those of the columns of the parameter's shape."""
    drawn = tuple(flag and codec.draw_bits > 0 for flag, codec in zip(stochastic, codecs, strict=False))
    flat = rule.by_rows()
    lanes = Lanes(flat, (*codecs, *[FP32] * len(rule.by_col)), drawn, True)
    formats = [codec.name for codec in codecs]
    key = content_key(
        "factored", _formula(rule), formats, len(rule.by_col), len(rule.by_row), drawn, rule.keeps_nonfinite
    )
    names = kernel_names(lanes, key)
    names |= _row_names(len(rule.by_row), len(rule.scalars))
    names["by_column"] = _shift(lanes, len(codecs))
    signature = types.void(
        _TABLE, _TABLE, _TABLE, _TABLE, _TABLE, _ROW, types.float32[:, ::1], _ROW, _ROW, types.uint64, types.float32
    )
    return compiled(specialise(body.factored, names, key), signature)


@cache
def sums_kernel(quantity: Quantity, codecs: tuple[Codec, ...], cols: bool) -> Any:
    """The kernel of the sums of a quantity; ``cols``: also by column."""
    formats = [codec.name for codec in codecs]
    key = content_key(
        "sums", _formula(quantity), quantity.reads, formats, len(quantity.by_col), len(quantity.by_row), cols
    )
    columns = len(codecs) + len(quantity.by_col)
    names: dict[str, Any] = {
        "WITH_COLS": cols,
        "pointers_of": tuple_of(columns, types.int64),
        "take_next": take_next,
        "fill": _fill(quantity, codecs),
        "offset": _offset([codec.bits for codec in codecs], len(quantity.by_col)),
        "address_of": _address_of,
        "piece_sum": _piece_sum,
        "clear": _clear,
        "add_to": _adding(1),
        "add_all": _adding(matrix_body.TOGETHER),
        **_row_names(len(quantity.by_row), len(quantity.scalars)),
    }
    f4 = types.float32
    signature = types.void(_TABLE, _TABLE, _TABLE, _TABLE, _TABLE, _ROW, f4[:, ::1], f4, _ROW, _ROW, _VECTOR, _VECTOR)
    return compiled(specialise(matrix_body.kernel, names, key), signature)


@cache
def finish_kernel() -> Any:
    key = content_key("finish")
    names: dict[str, Any] = {}
    for function in (matrix_body.tree, matrix_body.vector_sum):
        names[function.__name__] = inner(function, dict(names), key)
    signature = types.void(_TABLE, _VECTOR, _VECTOR, _VECTOR, _VECTOR, _VECTOR)
    return compiled(specialise(matrix_body.finish, names, key), signature)


def _formula(rule: Rule | Quantity) -> Any:
    return key_of(rule.formula, dict.fromkeys(PRIMITIVES))


def _row_names(by_row: int, scalars: int) -> dict[str, Any]:
    return {
        "row_pointers_of": tuple_of(max(by_row, 1), types.int64),
        "scalars_of": tuple_of(max(scalars, 1), types.float32),
        "row_scalars": _row_scalars(by_row, scalars),
    }


def _row_scalars(by_row: int, scalars: int) -> Any:
    """``row_scalars(row_addresses, common, row)``: the factors of the row, then the common scalars, as one tuple."""
    result = types.UniTuple(types.float32, max(1, by_row + scalars))

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses, common, row = args
        values = []
        for k in range(by_row):
            pointer = builder.inttoptr(builder.extract_value(addresses, k), FLOAT.as_pointer())
            values.append(builder.load(builder.gep(pointer, [row], inbounds=True), align=4))
        values += [builder.extract_value(common, s) for s in range(scalars)]
        return context.make_tuple(builder, result, values or [FLOAT(0.0)])

    @intrinsic
    def row_scalars(typing_context: Any, addresses: Any, common: Any, row: Any) -> Any:
        return result(addresses, common, types.int64), emit

    return row_scalars


def _shift(lanes: Lanes, elementwise: int) -> Any:
    """``by_column(addresses, positions)``: the factors by column moved by so many positions."""
    count = len(lanes.bits)
    result = types.UniTuple(types.int64, count)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses = [builder.extract_value(args[0], c) for c in range(count)]
        moved = builder.mul(args[1], _INDEX(4))
        addresses[elementwise:] = [builder.add(address, moved) for address in addresses[elementwise:]]
        return context.make_tuple(builder, result, addresses)

    @intrinsic
    def by_column(typing_context: Any, addresses: Any, positions: Any) -> Any:
        return result(result, types.int64), emit

    return by_column


def _offset(bits: list[int], by_col: int) -> Any:
    """``offset(addresses, position, column)``: the addresses at a position of tensors, and of factors by column."""
    result = types.UniTuple(types.int64, len(bits) + by_col)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        steps = [builder.mul(args[1], _INDEX(b // 8)) for b in bits] + [builder.mul(args[2], _INDEX(4))] * by_col
        values = [builder.add(builder.extract_value(args[0], c), step) for c, step in enumerate(steps)]
        return context.make_tuple(builder, result, values)

    @intrinsic
    def offset(typing_context: Any, addresses: Any, position: Any, column: Any) -> Any:
        return result(result, types.int64, types.int64), emit

    return offset


def _fill(quantity: Quantity, codecs: tuple[Codec, ...]) -> Any:
    """``fill(addresses, place, j, scalars, factor)``: stores the quantity of element j at position j of the place."""
    every = (*codecs, *[FP32] * len(quantity.by_col))
    value = traced(value_of(quantity, every, True))
    # The place is one more array, so that LLVM knows that it overlaps none of the others.
    memory = Memory([codec.bits for codec in (*every, FP32)])
    count = len(quantity.by_row) + len(quantity.scalars)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        addresses, place, j, scalars, factor = args
        arrays = [builder.extract_value(addresses, c) for c in range(len(every))]
        codes = [memory.load_one(builder, arrays[c], c, j) for c in range(len(every))]
        numbers = [Number(builder, builder.extract_value(scalars, s)) for s in range(count)]
        number = value(codes, numbers, Number(builder, factor))
        code = Word(builder, builder.bitcast(number.value, WORD))
        memory.store_one(builder, place, len(every), j, code)
        return context.get_dummy_value()

    @intrinsic
    def fill(typing_context: Any, addresses: Any, place: Any, j: Any, scalars: Any, factor: Any) -> Any:
        return types.void(addresses, types.int64, types.int64, scalars, types.float32), emit

    return fill


@intrinsic
def _piece_sum(typing_context: Any, place: Any, steps: Any) -> Any:
    """The sum of fp32 numbers at an address, so many times LANES of them; the lanes are one vector in registers."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, sums = (ir.VectorType(item, LANES) for item in (FLOAT, _DOUBLE))
        pointer = builder.inttoptr(args[0], numbers.as_pointer())
        zero = ir.Constant(sums, [0.0] * LANES)
        before = builder.block
        head, body_, after = (builder.append_basic_block(name) for name in ("head", "add", "tree"))
        builder.branch(head)
        builder.position_at_end(head)
        step, total = builder.phi(_INDEX), builder.phi(sums)
        builder.cbranch(builder.icmp_signed("<", step, args[1]), body_, after)
        builder.position_at_end(body_)
        added = builder.fadd(total, builder.fpext(builder.load(builder.gep(pointer, [step]), align=4), sums))
        following = builder.add(step, _INDEX(1))
        builder.branch(head)
        for phi, first, later in ((step, _INDEX(0), following), (total, zero, added)):
            phi.add_incoming(first, before)
            phi.add_incoming(later, body_)
        builder.position_at_end(after)
        lanes, count = total, LANES
        while count > 1:
            halves = [
                builder.shuffle_vector(lanes, ir.Constant(lanes.type, ir.Undefined), _lanes(range(first, count, 2)))
                for first in (0, 1)
            ]
            lanes, count = builder.fadd(*halves), count // 2
        return builder.extract_element(lanes, ir.IntType(32)(0))

    return types.float64(types.int64, types.int64), emit


def _lanes(numbers: range) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), list(numbers))


@intrinsic
def _clear(typing_context: Any, totals: Any, j: Any) -> Any:
    """Makes the fp64 number j at an address zero."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(_DOUBLE(0.0), builder.gep(builder.inttoptr(args[0], _DOUBLE.as_pointer()), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _adding(rows: int) -> Any:
    """``add(totals, place, j)``: adds the fp32 number j of so many rows, PIECE numbers apart, to the fp64 number j."""
    memory = Memory([64, *[32] * rows])

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, place, j = args
        into = builder.gep(builder.inttoptr(totals, _DOUBLE.as_pointer()), [j], inbounds=True)
        total = memory.tag(builder, builder.load(into), 0)
        for row in range(rows):
            pointer = builder.inttoptr(builder.add(place, _INDEX(4 * PIECE * row)), FLOAT.as_pointer())
            number = memory.tag(builder, builder.load(builder.gep(pointer, [j], inbounds=True)), 1 + row)
            total = builder.fadd(total, builder.fpext(number, _DOUBLE))
        memory.tag(builder, builder.store(total, into), 0)
        return context.get_dummy_value()

    @intrinsic
    def add(typing_context: Any, totals: Any, place: Any, j: Any) -> Any:
        return types.void(types.int64, types.int64, types.int64), emit

    return add


@intrinsic
def _address_of(typing_context: Any, array: Any) -> Any:
    """The address of an array's first element."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _INDEX)

    return types.int64(array), emit
