"""Typed loads and stores for the Numba kernel, as LLVM instructions.

A kernel touches ``T`` arrays given by address. Each array's loads and stores carry alias-scope metadata, which tells
LLVM that the arrays do not overlap: without it the loop vectoriser gives up beyond about four arrays (it would need more
run-time overlap checks than it allows) and the loop runs 4 to 12 times slower.

16-bit arrays are read and written two elements at a time, as one 32-bit lane: even elements are the low half, odd ones the
high half. That takes one shift or mask an element and no shuffle, and one noise word serves both (docs/noise.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from subulp.formula.noise import MIX_C0, MIX_C1, MIX_C2

u32, u64, i32, f32 = np.uint32, np.uint64, np.int32, np.float32

_WORD = ir.IntType(32)
_FLOAT = ir.FloatType()


def mix(counter, k0, k1):  # type: ignore[no-untyped-def]
    """``subulp.formula.noise.keyed_mix`` on uint32."""
    x = u32(counter ^ k0)
    x = u32(u32(x ^ (x >> u32(17))) * u32(MIX_C0))
    x = u32(u32(x ^ (x >> u32(11))) ^ k1)
    x = u32(x * u32(MIX_C1))
    x = u32(u32(x ^ (x >> u32(15))) * u32(MIX_C2))
    return u32(u32(x ^ (x >> u32(14))) ^ counter)


# Encoders: fp32 bits to the bits that are stored. The bf16 ones leave their result in the high half.


def bf16_stochastic(bits, draw):  # type: ignore[no-untyped-def]
    magnitude = i32(bits & u32(0x7FFFFFFF))
    return u32(bits + (draw if magnitude < i32(0x7F7F0000) else u32(0)))


def bf16_quiet(bits):  # type: ignore[no-untyped-def]
    magnitude = i32(bits & u32(0x7FFFFFFF))
    return u32(bits | (u32(0x00400000) if magnitude > i32(0x7F800000) else u32(0)))


def bf16_nearest(bits):  # type: ignore[no-untyped-def]
    magnitude = i32(bits & u32(0x7FFFFFFF))
    rounded = u32(bits + u32(0x7FFF) + u32((bits >> u32(16)) & u32(1)))
    return u32(bits | u32(0x00400000)) if magnitude > i32(0x7F800000) else rounded


def fp16_stochastic(bits, draw):  # type: ignore[no-untyped-def]
    magnitude = u32(bits & u32(0x7FFFFFFF))
    exponent = u32(magnitude >> u32(23))
    mantissa = u32((magnitude & u32(0x7FFFFF)) | u32(0x800000)) if exponent > u32(0) else magnitude
    exponent = exponent if exponent > u32(0) else u32(1)
    shift = u32(13) + (u32(u32(113) - exponent) if exponent < u32(113) else u32(0))
    shift = shift if shift < u32(63) else u32(63)
    kept_and_fraction = u64(u64(u64(mantissa) << u64(32)) >> u64(shift))
    code = u32(u64(kept_and_fraction + u64(draw)) >> u64(32))
    code = u32(code + (u32(u32(exponent - u32(113)) << u32(10)) if exponent > u32(113) else u32(0)))
    code = code if code < u32(0x7BFF) else u32(0x7BFF)
    code = u32(0x7C00) if magnitude == u32(0x7F800000) else code
    code = u32(0x7E00) if magnitude > u32(0x7F800000) else code
    return u32(code | u32(u32(bits & u32(0x80000000)) >> u32(16)))


_UNARY = types.uint32(types.uint32)
_BINARY = types.uint32(types.uint32, types.uint32)
_MIX = types.uint32(types.uint32, types.uint32, types.uint32)


class Lanes:
    """The intrinsics of one kernel signature.

    Args:
        dtypes: "bf16", "fp16" or "fp32" of each array, written ones first.
        written: how many arrays are written.
        stochastic: of each written array, whether its stores are stochastic.
        raw: whether stored values may be NaNs that no arithmetic has touched (and quieted).
        keeps_nonfinite: whether a non-finite target value stays as it is.
    """

    def __init__(
        self, dtypes: Sequence[str], written: int, stochastic: Sequence[bool], raw: bool, keeps_nonfinite: bool
    ) -> None:
        self.dtypes = tuple(dtypes)
        self.written = written
        self.stochastic = stochastic
        self.raw = raw
        self.keeps_nonfinite = keeps_nonfinite
        self.words = tuple(128 + slot if d == "fp16" else slot for slot, d in enumerate(self.dtypes[:written]))
        self.paired = "fp32" not in self.dtypes[:1] or any(d != "fp32" for d in self.dtypes[:written])

    def load_pair(self) -> Any:
        """``load_pair(addresses, j) -> (even values, odd values)`` of element pair j."""
        return self._load((0, 1), 2)

    def load_one(self) -> Any:
        """``load_one(addresses, k) -> (values,)`` of element k."""
        return self._load((0,), 1)

    def _load(self, halves: tuple[int, ...], per_index: int) -> Any:
        count = len(self.dtypes)
        values = types.UniTuple(types.float32, count)
        result = types.UniTuple(values, len(halves))

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            addresses, index = args
            columns = [self._load_array(builder, addresses, c, index, halves, per_index) for c in range(count)]
            tuples = [context.make_tuple(builder, values, [col[h] for col in columns]) for h in range(len(halves))]
            return context.make_tuple(builder, result, tuples)

        @intrinsic
        def load(typing_context: Any, addresses: Any, index: Any) -> Any:
            return result(types.UniTuple(types.int64, count), types.int64), emit

        return load

    def _load_array(
        self, builder: Any, addresses: Any, column: int, index: Any, halves: tuple[int, ...], per_index: int
    ) -> list[Any]:
        dtype = self.dtypes[column]
        address = builder.extract_value(addresses, column)
        if dtype == "fp32":
            pointer = builder.inttoptr(address, _FLOAT.as_pointer())
            return [
                self._tag(builder.load(self._element(builder, pointer, index, per_index, h), align=4), builder, column)
                for h in halves
            ]
        carrier = ir.IntType(16 * per_index)
        pointer = builder.gep(builder.inttoptr(address, carrier.as_pointer()), [index], inbounds=True)
        lane = self._tag(builder.load(pointer, align=2), builder, column)
        if per_index == 1:
            lane = builder.zext(lane, _WORD)
        if dtype == "fp16":
            parts = [builder.trunc(builder.lshr(lane, _WORD(16 * h)), ir.IntType(16)) for h in halves]
            return [builder.fpext(builder.bitcast(part, ir.HalfType()), _FLOAT) for part in parts]
        parts = [builder.and_(lane, _WORD(0xFFFF0000)) if h else builder.shl(lane, _WORD(16)) for h in halves]
        return [builder.bitcast(part, _FLOAT) for part in parts]

    def store_pair(self) -> Any:
        """``store_pair(addresses, j, even values, odd values, even old target, odd old target, q, keys)``.

        ``q`` is the low half of the pair's counter (global index >> 1), ``keys`` two for each written array.
        """
        count, written = len(self.dtypes), self.written
        new = types.UniTuple(types.float32, written)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            addresses, index, even, odd, old_even, old_odd, counter, keys = args
            for c in range(written):
                values = [builder.extract_value(even, c), builder.extract_value(odd, c)]
                if c == 0 and self.keeps_nonfinite:
                    values = [_keep(builder, v, old) for v, old in zip(values, (old_even, old_odd), strict=True)]
                draws = self._draws(context, builder, c, counter, keys)
                self._store_pair_array(context, builder, addresses, c, index, values, draws)
            return context.get_dummy_value()

        @intrinsic
        def store(
            typing_context: Any,
            addresses: Any,
            index: Any,
            even: Any,
            odd: Any,
            old_even: Any,
            old_odd: Any,
            counter: Any,
            keys: Any,
        ) -> Any:
            return types.void(
                types.UniTuple(types.int64, count),
                types.int64,
                new,
                new,
                types.float32,
                types.float32,
                types.uint32,
                types.UniTuple(types.uint32, 2 * written),
            ), emit

        return store

    def store_one(self) -> Any:
        """``store_one(addresses, k, values, old target, index, keys)`` of element k with global index ``index``."""
        count, written = len(self.dtypes), self.written
        new = types.UniTuple(types.float32, written)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            addresses, position, values, old, index, keys = args
            is_odd = builder.trunc(index, ir.IntType(1))
            counter = builder.trunc(builder.lshr(index, ir.IntType(64)(1)), _WORD)
            for c in range(written):
                value = builder.extract_value(values, c)
                if c == 0 and self.keeps_nonfinite:
                    value = _keep(builder, value, old)
                low, high = self._draws(context, builder, c, counter, keys)
                draw = builder.select(is_odd, high, low)
                self._store_one_array(context, builder, addresses, c, position, value, draw)
            return context.get_dummy_value()

        @intrinsic
        def store(
            typing_context: Any, addresses: Any, position: Any, values: Any, old: Any, index: Any, keys: Any
        ) -> Any:
            return types.void(
                types.UniTuple(types.int64, count),
                types.int64,
                new,
                types.float32,
                types.int64,
                types.UniTuple(types.uint32, 2 * written),
            ), emit

        return store

    def _draws(self, context: Any, builder: Any, column: int, counter: Any, keys: Any) -> list[Any]:
        """The draws of the even and the odd element of a pair."""
        if not self.stochastic[column]:
            return [_WORD(0), _WORD(0)]
        k0, k1 = builder.extract_value(keys, 2 * column), builder.extract_value(keys, 2 * column + 1)

        def word(c: Any) -> Any:
            return context.compile_internal(builder, mix, _MIX, [c, k0, k1])

        if self.dtypes[column] == "fp16":
            even = builder.shl(counter, _WORD(1))
            return [word(even), word(builder.or_(even, _WORD(1)))]
        both = word(counter)
        return [builder.and_(both, _WORD(0xFFFF)), builder.lshr(both, _WORD(16))]

    def _encode(self, context: Any, builder: Any, column: int, value: Any, draw: Any) -> Any:
        """The stored bits of a value: bf16 in the high half of a word, fp16 in the low half."""
        bits = builder.bitcast(value, _WORD)

        def call(function: Callable[..., Any], signature: Any, *args: Any) -> Any:
            return context.compile_internal(builder, function, signature, list(args))

        if self.dtypes[column] == "fp16":
            if self.stochastic[column]:
                return call(fp16_stochastic, _BINARY, bits, draw)
            half = builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
            return builder.zext(half, _WORD)
        if not self.stochastic[column]:
            return call(bf16_nearest, _UNARY, bits)
        rounded = call(bf16_stochastic, _BINARY, bits, draw)
        return call(bf16_quiet, _UNARY, rounded) if self.raw else rounded

    def _store_pair_array(
        self, context: Any, builder: Any, addresses: Any, column: int, index: Any, values: list[Any], draws: list[Any]
    ) -> None:
        address = builder.extract_value(addresses, column)
        if self.dtypes[column] == "fp32":
            pointer = builder.inttoptr(address, _FLOAT.as_pointer())
            for h in (0, 1):
                store = builder.store(values[h], self._element(builder, pointer, index, 2, h), align=4)
                self._tag(store, builder, column)
            return
        even, odd = (self._encode(context, builder, column, v, d) for v, d in zip(values, draws, strict=True))
        if self.dtypes[column] == "bf16":
            lane = builder.or_(builder.lshr(even, _WORD(16)), builder.and_(odd, _WORD(0xFFFF0000)))
        else:
            lane = builder.or_(even, builder.shl(odd, _WORD(16)))
        pointer = builder.gep(builder.inttoptr(address, _WORD.as_pointer()), [index], inbounds=True)
        self._tag(builder.store(lane, pointer, align=2), builder, column)

    def _store_one_array(
        self, context: Any, builder: Any, addresses: Any, column: int, position: Any, value: Any, draw: Any
    ) -> None:
        address = builder.extract_value(addresses, column)
        if self.dtypes[column] == "fp32":
            pointer = builder.gep(builder.inttoptr(address, _FLOAT.as_pointer()), [position], inbounds=True)
            self._tag(builder.store(value, pointer, align=4), builder, column)
            return
        bits = self._encode(context, builder, column, value, draw)
        if self.dtypes[column] == "bf16":
            bits = builder.lshr(bits, _WORD(16))
        half = ir.IntType(16)
        pointer = builder.gep(builder.inttoptr(address, half.as_pointer()), [position], inbounds=True)
        self._tag(builder.store(builder.trunc(bits, half), pointer, align=2), builder, column)

    @staticmethod
    def _element(builder: Any, pointer: Any, index: Any, per_index: int, half: int) -> Any:
        if per_index == 2:
            index = builder.add(builder.shl(index, index.type(1), flags=["nsw"]), index.type(half), flags=["nsw"])
        return builder.gep(pointer, [index], inbounds=True)

    def _tag(self, instruction: Any, builder: Any, column: int) -> Any:
        """Marks a load or store as touching this column's array alone."""
        module = builder.module
        domain = module.add_metadata([ir.MetaDataString(module, "subulp.columns")])
        scopes = [
            module.add_metadata([ir.MetaDataString(module, f"subulp.column.{c}"), domain])
            for c in range(len(self.dtypes))
        ]
        instruction.set_metadata("alias.scope", module.add_metadata([scopes[column]]))
        if len(scopes) > 1:
            others = [scope for c, scope in enumerate(scopes) if c != column]
            instruction.set_metadata("noalias", module.add_metadata(others))
        return instruction


def _keep(builder: Any, value: Any, old: Any) -> Any:
    magnitude = builder.and_(builder.bitcast(old, _WORD), _WORD(0x7FFFFFFF))
    finite = builder.icmp_signed("<", magnitude, _WORD(0x7F800000))
    return builder.select(finite, value, old)
