"""The noise function: known answers, test vectors, counters beyond 32 bits, names."""

from pathlib import Path

import pytest
import torch

from subulp.formula.noise import keyed_mix, philox
from subulp.formula.words import Word
from subulp.numerics.draws import word_keys
from subulp.numerics.streams import stream_of_name
from tests.numerics.noises import narrow_draw, noise_word, wide_draw

# Random123 1.14, kat_vectors, "philox4x32 10".
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    assert tuple(word.integers() for word in philox(*map(Word, (*counter, *key)))) == answer


def test_words_follow_the_specification_from_integers_alone():
    """The mix written again over Python integers, as docs/noise.md states it."""

    def mix(counter: int, k0: int, k1: int) -> int:
        x = counter ^ k0
        x = ((x ^ (x >> 17)) * 0xED5AD4BB) & 0xFFFFFFFF
        x = x ^ (x >> 11) ^ k1
        x = (x * 0xAC4C1B51) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x31848BAB) & 0xFFFFFFFF
        return x ^ (x >> 14) ^ counter

    counters = [0, 1, 2, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]
    for k0, k1 in [(0, 0), (1, 0), (0, 1), (0xDEADBEEF, 0x12345678), (0xFFFFFFFF, 0x80000000)]:
        signed = torch.tensor(counters).to(torch.int64)
        low = torch.where(signed >= 2**31, signed - 2**32, signed).to(torch.int32)
        words = keyed_mix(Word(low), Word(k0), Word(k1)).integers()
        assert words.tolist() == [mix(c, k0, k1) for c in counters]


def test_words_repeat_as_often_as_independent_ones():
    """The last xor with the counter undoes the permutation, whose words would never repeat.

    Among n = 2**20 independent words the number of repeats is Poisson with mean n**2 / 2**33 = 128: |z| < 5.5.
    """
    words = noise_word(torch.arange(1 << 20), seed=1, stream=2, step=3, word=0)
    repeats = (1 << 20) - words.unique().numel()
    assert abs(repeats - 128) / 128**0.5 < 5.5


def test_narrow_draws_are_the_halves_of_one_word():
    index = torch.arange(10)
    word = noise_word(torch.arange(5), seed=7, stream=8, step=9, word=2)
    draws = narrow_draw(index, seed=7, stream=8, step=9, slot=2)
    assert torch.equal(draws[0::2].to(torch.int64), word & 0xFFFF)
    assert torch.equal(draws[1::2].to(torch.int64), word >> 16)


@pytest.mark.parametrize("draw", [narrow_draw, wide_draw])
@pytest.mark.parametrize("border", [2**31, 2**32, 2**33, 3 * 2**32, 2**40])
def test_counters_beyond_32_bits(draw, border):
    """Each element's draw is the same whether it is asked for alone or in a run that crosses a border of the high word."""
    index = torch.arange(border - 5, border + 5)
    run = draw(index, seed=1, stream=2, step=3, slot=0)
    alone = torch.cat([draw(index[i : i + 1], seed=1, stream=2, step=3, slot=0) for i in range(10)])
    assert torch.equal(run, alone)


def test_high_words_give_other_noise():
    low = narrow_draw(torch.arange(1000), seed=1, stream=2, step=3, slot=0)
    high = narrow_draw(torch.arange(1000) + 2**33, seed=1, stream=2, step=3, slot=0)
    assert (low == high).sum() < 10  # 1000 / 65536 expected


def test_every_part_of_the_key_matters():
    base = {"seed": 1, "stream": 2, "step": 3, "word": 4, "counter_high": 5}
    keys = {word_keys(**base)}
    changes = [("seed", 1 + 2**32), ("seed", 2), ("stream", 2 + 2**32), ("stream", 3), ("step", 4), ("word", 5)]
    for name, value in [*changes, ("word", 6), ("counter_high", 6), ("counter_high", 5 + 2**16)]:
        keys.add(word_keys(**{**base, name: value}))
    assert len(keys) == 10


def test_stream_names():
    name = "encoder.layers.3.weight"
    wrapped = [
        "module.encoder.layers.3.weight",
        "_orig_mod.encoder.layers.3.weight",
        "module._orig_mod.encoder.layers.3.weight",
        "_orig_mod.module.encoder.layers.3.weight",
        "encoder.layers.3._checkpoint_wrapped_module.weight",
        "encoder._fsdp_wrapped_module.layers.3.weight",
    ]
    assert {stream_of_name(n) for n in wrapped} == {stream_of_name(name)}
    assert stream_of_name(name) == 4913598096312467146  # a promise: it never changes
    assert stream_of_name("encoder.module.weight") != stream_of_name("encoder.weight")
    assert stream_of_name("module") == stream_of_name("module")
    assert 0 <= stream_of_name("") < 2**63


def test_vectors_of_the_specification():
    """Every row of the two tables in docs/noise.md."""
    page = (Path(__file__).parents[2] / "docs" / "noise.md").read_text()
    tables: dict[str, list[list[int]]] = {"high": [], "index": []}
    header = ""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) != 7:
            header = ""
        elif cells[0] == "seed":
            header = cells[4]
        elif header in tables and not cells[0].startswith("-"):
            tables[header].append([int(cell, 0) for cell in cells])
    assert len(tables["high"]) == 4
    assert len(tables["index"]) == 9
    for *key, k0, k1 in tables["high"]:
        assert word_keys(*key) == (k0, k1)
    for seed, stream, step, slot, index, narrow, wide in tables["index"]:
        position = torch.tensor([index])
        assert int(narrow_draw(position, seed, stream, step, slot)) == narrow
        assert int(wide_draw(position, seed, stream, step, slot)) == wide
