"""One element's update: its codes to numbers, the rule's formula, one rounding for each number that is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from subulp.formula.define import define
from subulp.formula.ops import absolute, where
from subulp.formula.rule import Quantity, Rule
from subulp.storage.codec import Codec

INFINITY = float("inf")


@dataclass(frozen=True)
class Element:
    """Formulas over words and numbers, compiled by every backend."""

    update: Callable[..., Any]
    """``update(codes, scalars[, factor]) -> numbers``: what is written, the target first, from the codes of all columns."""
    encode: Callable[..., Any]
    """``encode(slot, number, draw, old) -> code`` of what a slot (an int) gets; ``old`` is its code until now."""
    draws: tuple[int, ...]
    """The random bits that each slot needs."""


@cache
def element_of(rule: Rule, codecs: tuple[Codec, ...], stochastic: tuple[bool, ...], scaled: bool) -> Element:
    """The update of one element.

    ``codecs`` are those of the columns: what is written, then what is read. ``stochastic`` says how each slot is rounded.
    ``scaled``: the first read number is multiplied by ``factor``; not even a factor of 1.0 is for free, since it would quiet
    a NaN that is only copied.
    """
    written = len(codecs) - len(rule.reads)
    draws = tuple(codec.draw_bits if drawn else 0 for codec, drawn in zip(codecs, stochastic, strict=False))
    update = _decoded(rule.formula, len(rule.scalars), codecs, written if scaled else None)
    return Element(update, _encode(rule, codecs[:written], draws), draws)


@cache
def value_of(quantity: Quantity, codecs: tuple[Codec, ...], scaled: bool) -> Any:
    """``value(codes, scalars[, factor]) -> number``; the gradient ``g`` is multiplied by ``factor`` if ``scaled``."""
    g = quantity.reads.index("g") if scaled and "g" in quantity.reads else None
    return _decoded(quantity.formula, len(quantity.by_row) + len(quantity.scalars), codecs, g, scaled)


def _decoded(
    formula: Any, scalars: int, codecs: Sequence[Codec], column: int | None, scaled: bool | None = None
) -> Any:
    """The formula of codes; the number of one column is multiplied by the factor."""
    scaled = column is not None if scaled is None else scaled
    numbers = [f"decode{c}(codes[{c}]){' * factor' * (c == column)}" for c in range(len(codecs))]
    arguments = [*numbers, *(f"scalars[{s}]" for s in range(scalars))]
    text = f"def update(codes, scalars{', factor' * scaled}):\n    return formula({', '.join(arguments)})\n"
    return define("update", text, {"formula": formula} | {f"decode{c}": x.decode for c, x in enumerate(codecs)})


def _encode(rule: Rule, codecs: Sequence[Codec], draws: Sequence[int]) -> Any:
    names: dict[str, Any] = {"where": where, "absolute": absolute, "INFINITY": INFINITY}
    lines = ["def encode(slot, number, draw, old):"]
    for slot, codec in enumerate(codecs):
        names |= {f"decode{slot}": codec.decode, f"encode{slot}": codec.encode, f"nearest{slot}": codec.nearest}
        kept = f"decode{slot}(old)"
        finite = f"absolute({kept}) < INFINITY"
        keeps = rule.keeps_nonfinite and slot == 0
        number = "number"
        if rule.raw and codec.quiet is not None:
            names[f"quiet{slot}"] = codec.quiet
            number = f"quiet{slot}({number})"
        if keeps and draws[slot] and codec.keeps_specials:  # the number, which takes no code apart
            number, keeps = f"where({finite}, {number}, {kept})", False
        code = f"encode{slot}({number}, draw)" if draws[slot] else f"nearest{slot}({number})"
        lines.append(f"    {'el' * (slot > 0)}if slot == {slot}:")
        lines.append(f"        return where({finite}, {code}, old)" if keeps else f"        return {code}")
    return define("encode", "\n".join(lines) + "\n", names)
