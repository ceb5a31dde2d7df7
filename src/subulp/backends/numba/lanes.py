"""What the Numba kernel does to one element or a pair of them, as LLVM instructions: memory here, the rest from formulas.

A kernel touches ``T`` arrays given by address. Each array's loads and stores carry alias-scope metadata, which tells
LLVM that the arrays do not overlap: without it the loop vectoriser gives up beyond about four arrays (it would need more
run-time overlap checks than it allows) and the loop runs 4 to 12 times slower.

Arrays of 8 and 16 bits are read and written two elements at a time, as one lane of 16 or 32 bits: even elements are the low
half, odd ones the high half. That takes one shift or mask an element and no shuffle, and one noise word serves both
(docs/noise.md).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from subulp.backends.numba.trace import FLOAT, WORD, Number, Traced, Word, traced
from subulp.formula.noise import halves, key_block, keyed_mix, keyed_mix_pair, word_of
from subulp.formula.rule import Rule
from subulp.storage.codec import Codec
from subulp.storage.element import element_of

_INDEX = ir.IntType(64)


class Memory:
    """Loads and stores of arrays with elements of so many bits, each marked as touching its own array alone."""

    def __init__(self, bits: list[int]) -> None:
        self.bits = bits

    def load_pair(self, builder: Any, address: Any, column: int, index: Any) -> list[Word]:
        bits = self.bits[column]
        if bits == 32:
            pointer = self._pointer(builder, address, FLOAT)
            loads = [builder.load(self._element(builder, pointer, index, h), align=4) for h in (0, 1)]
            return [Word(builder, builder.bitcast(self.tag(builder, load, column), WORD)) for load in loads]
        pointer = builder.gep(self._pointer(builder, address, ir.IntType(2 * bits)), [index], inbounds=True)
        lane = self.tag(builder, builder.load(pointer, align=bits // 8), column)
        both = Word(builder, lane if bits == 16 else builder.zext(lane, WORD))
        return [both & ((1 << bits) - 1), both >> bits]

    def store_pair(self, builder: Any, address: Any, column: int, index: Any, codes: list[Word]) -> None:
        bits = self.bits[column]
        if bits == 32:
            pointer = self._pointer(builder, address, FLOAT)
            for h, code in enumerate(codes):
                number = builder.bitcast(code.value, FLOAT)
                self.tag(builder, builder.store(number, self._element(builder, pointer, index, h), align=4), column)
            return
        lane = (codes[0] | (codes[1] << bits)).value
        carrier = ir.IntType(2 * bits)
        pointer = builder.gep(self._pointer(builder, address, carrier), [index], inbounds=True)
        lane = lane if bits == 16 else builder.trunc(lane, carrier)
        self.tag(builder, builder.store(lane, pointer, align=bits // 8), column)

    def load_one(self, builder: Any, address: Any, column: int, position: Any) -> Word:
        bits = self.bits[column]
        carrier = FLOAT if bits == 32 else ir.IntType(bits)
        pointer = builder.gep(self._pointer(builder, address, carrier), [position], inbounds=True)
        value = self.tag(builder, builder.load(pointer, align=bits // 8), column)
        return Word(builder, builder.bitcast(value, WORD) if bits == 32 else builder.zext(value, WORD))

    def store_one(self, builder: Any, address: Any, column: int, position: Any, code: Traced) -> None:
        bits = self.bits[column]
        carrier = FLOAT if bits == 32 else ir.IntType(bits)
        pointer = builder.gep(self._pointer(builder, address, carrier), [position], inbounds=True)
        value = builder.bitcast(code.value, FLOAT) if bits == 32 else builder.trunc(code.value, carrier)
        self.tag(builder, builder.store(value, pointer, align=bits // 8), column)

    @staticmethod
    def _pointer(builder: Any, address: Any, item: Any) -> Any:
        return builder.inttoptr(address, item.as_pointer())

    @staticmethod
    def _element(builder: Any, pointer: Any, index: Any, half: int) -> Any:
        index = builder.add(builder.shl(index, index.type(1), flags=["nsw"]), index.type(half), flags=["nsw"])
        return builder.gep(pointer, [index], inbounds=True)

    def tag(self, builder: Any, instruction: Any, column: int) -> Any:
        """Marks a load or store as touching this column's array alone."""
        module = builder.module
        domain = module.add_metadata([ir.MetaDataString(module, "subulp.columns")])
        scopes = [
            module.add_metadata([ir.MetaDataString(module, f"subulp.column.{c}"), domain])
            for c in range(len(self.bits))
        ]
        instruction.set_metadata("alias.scope", module.add_metadata([scopes[column]]))
        if len(scopes) > 1:
            others = [scope for c, scope in enumerate(scopes) if c != column]
            instruction.set_metadata("noalias", module.add_metadata(others))
        return instruction


class Lanes:
    """The intrinsics of one kernel.

    Args:
        rule: the update.
        codecs: the format of each array, written ones first.
        stochastic: of each written array, whether its stores are stochastic.
        scaled: whether the first read number is multiplied by the factor.
    """

    def __init__(self, rule: Rule, codecs: tuple[Codec, ...], stochastic: tuple[bool, ...], scaled: bool) -> None:
        self.bits = [codec.bits for codec in codecs]
        self.memory = Memory(self.bits)
        self.written = len(stochastic)
        self.scalars = len(rule.scalars)
        self.scaled = scaled
        element = element_of(rule, codecs, stochastic, scaled)
        self.draws = element.draws
        self.update, self.encode = traced(element.update), traced(element.encode)
        self.paired = any(bits < 32 for bits in self.bits[: self.written])
        self._addresses = types.UniTuple(types.int64, len(codecs))
        self._scalars = types.UniTuple(types.float32, max(self.scalars, 1))
        self._keys = types.UniTuple(types.uint32, 2 * self.written)

    def update_pair(self) -> Any:
        """``update_pair(addresses, j, scalars, factor, counter, keys)``: elements 2j and 2j + 1.

        ``counter`` is the low half of the pair's counter (global index >> 1), ``keys`` two for each written array.
        """

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            addresses, index, scalars, factor, counter, keys = args
            arrays = [builder.extract_value(addresses, c) for c in range(len(self.bits))]
            pairs = [self.memory.load_pair(builder, array, c, index) for c, array in enumerate(arrays)]
            new = [self._update(builder, [pair[h] for pair in pairs], scalars, factor) for h in (0, 1)]
            for slot in range(self.written):
                draws = self._pair_draws(builder, slot, Word(builder, counter), keys)
                codes = [self.encode(slot, new[h][slot], draws[h], pairs[slot][h]) for h in (0, 1)]
                self.memory.store_pair(builder, arrays[slot], slot, index, codes)
            return context.get_dummy_value()

        @intrinsic
        def update_pair(
            typing_context: Any, addresses: Any, j: Any, scalars: Any, factor: Any, counter: Any, keys: Any
        ) -> Any:
            return types.void(
                self._addresses, types.int64, self._scalars, types.float32, types.uint32, self._keys
            ), emit

        return update_pair

    def update_one(self) -> Any:
        """``update_one(addresses, k, scalars, factor, index, keys)``: element k, with global index ``index``."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            addresses, position, scalars, factor, index, keys = args
            arrays = [builder.extract_value(addresses, c) for c in range(len(self.bits))]
            codes = [self.memory.load_one(builder, array, c, position) for c, array in enumerate(arrays)]
            for slot, number in enumerate(self._update(builder, codes, scalars, factor)):
                code = self.encode(slot, number, self._draw(builder, slot, index, keys), codes[slot])
                self.memory.store_one(builder, arrays[slot], slot, position, code)
            return context.get_dummy_value()

        @intrinsic
        def update_one(
            typing_context: Any, addresses: Any, k: Any, scalars: Any, factor: Any, index: Any, keys: Any
        ) -> Any:
            return types.void(self._addresses, types.int64, self._scalars, types.float32, types.int64, self._keys), emit

        return update_one

    def keys(self) -> Any:
        """``keys(seed, stream, step, index)``: two for each written array, at global indices with this ``index >> 32``."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            seed, stream, step, index = (_words(builder, value) for value in args)
            high = {32: index[1], 16: index[1] >> 1}  # of a counter: the index, or half of it
            blocks: dict[Any, Any] = {}
            result = []
            for slot, bits in enumerate(self.draws):
                pair: Any = [WORD(0), WORD(0)]
                if bits:
                    word = word_of(slot, bits)
                    block = (word >> 1, bits)
                    if block not in blocks:
                        blocks[block] = traced(key_block)(*seed, *stream, step[0], word >> 1, high[bits])
                    odd = 2 * (word & 1)
                    pair = [key.value for key in blocks[block][odd : odd + 2]]
                result += pair
            return context.make_tuple(builder, self._keys, result)

        @intrinsic
        def keys(typing_context: Any, seed: Any, stream: Any, step: Any, index: Any) -> Any:
            return self._keys(types.uint64, types.int64, types.int64, types.int64), emit

        return keys

    def offset(self) -> Any:
        """``offset(addresses, position)``: the addresses of that element."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = [
                builder.add(builder.extract_value(args[0], c), builder.mul(args[1], args[1].type(bits // 8)))
                for c, bits in enumerate(self.bits)
            ]
            return context.make_tuple(builder, self._addresses, values)

        @intrinsic
        def offset(typing_context: Any, addresses: Any, position: Any) -> Any:
            return self._addresses(self._addresses, types.int64), emit

        return offset

    def _update(self, builder: Any, codes: list[Word], scalars: Any, factor: Any) -> Any:
        numbers = [Number(builder, builder.extract_value(scalars, s)) for s in range(self.scalars)]
        return self.update(codes, numbers, *((Number(builder, factor),) if self.scaled else ()))

    def _pair_draws(self, builder: Any, slot: int, counter: Word, keys: Any) -> Any:
        """The draws of the even and of the odd element; Nones where there is none."""
        bits, pair = self.draws[slot], self._keys_of(builder, slot, keys)
        if not bits:
            return None, None
        if bits > 16:
            return traced(keyed_mix_pair)(counter << 1, *pair)
        return traced(halves)(traced(keyed_mix)(counter, *pair))

    def _draw(self, builder: Any, slot: int, index: Any, keys: Any) -> Any:
        bits, pair = self.draws[slot], self._keys_of(builder, slot, keys)
        if not bits:
            return None
        counter = index if bits > 16 else builder.lshr(index, _INDEX(1))
        word = traced(keyed_mix)(Word(builder, builder.trunc(counter, WORD)), *pair)
        if bits > 16:
            return word
        even, odd = traced(halves)(word)
        return Word(builder, builder.select(builder.trunc(index, ir.IntType(1)), odd.value, even.value))

    @staticmethod
    def _keys_of(builder: Any, slot: int, keys: Any) -> list[Word]:
        return [Word(builder, builder.extract_value(keys, 2 * slot + i)) for i in (0, 1)]


def _words(builder: Any, value: Any) -> tuple[Word, Word]:
    """The low and the high half of a 64-bit number."""
    high = builder.lshr(value, _INDEX(32))
    return Word(builder, builder.trunc(value, WORD)), Word(builder, builder.trunc(high, WORD))
