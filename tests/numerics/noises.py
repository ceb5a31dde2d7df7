"""Noise as the numbers that it is."""

from torch import Tensor

from subulp.numerics import draws


def noise_word(counter: Tensor, seed: int, stream: int, step: int, word: int) -> Tensor:
    result: Tensor = draws.noise_word(counter, seed, stream, step, word).integers()
    return result


def narrow_draw(index: Tensor, seed: int, stream: int, step: int, slot: int) -> Tensor:
    result: Tensor = draws.draw(index, seed, stream, step, slot, 16).integers()
    return result


def wide_draw(index: Tensor, seed: int, stream: int, step: int, slot: int) -> Tensor:
    result: Tensor = draws.draw(index, seed, stream, step, slot, 32).integers()
    return result
