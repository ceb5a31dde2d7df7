"""Faults in what every backend compiles: noise, storage formats, parts of rules; and in sums and passes."""

from __future__ import annotations

from faults import Mutant, faults

MUTANTS: list[Mutant] = [
    *faults(
        "formula/noise.py",
        "numerics/test_noise.py",
        ("noise-words-of-one-key", "(counter_high << 8) | block", "(counter_high << 8) | (block & 0)"),
        ("noise-counter-lost", "x ^ (x >> 14) ^ counter", "x ^ (x >> 14)"),
        ("noise-second-key-lost", "x ^ (x >> 11) ^ k1", "x ^ (x >> 11)"),
        ("noise-halves-exchanged", "return word & 0xFFFF, word >> 16", "return word >> 16, word & 0xFFFF"),
    ),
    *faults(
        "numerics/draws.py",
        "numerics/test_noise.py",
        ("draws-odd-word-takes-even-keys", "block[2:] if word & 1 else block[:2]", "block[:2]"),
        ("draws-last-high-word-missing", "range(lowest + 1, highest + 1)", "range(lowest + 1, highest)"),
        ("draws-odd-elements-as-even", "index & 1 == 1, odd, even", "index & 1 == 2, odd, even"),
    ),
    *faults(
        "numerics/streams.py",
        "numerics/test_noise.py",
        ("streams-compiled-names-differ", '{"_orig_mod", ', "{"),
        ("streams-ddp-names-differ", 'parts[0] == "module"', 'parts[0] == "modules"'),
    ),
    *faults(
        "storage/bf16.py",
        "numerics/test_formats.py",
        ("bf16-carries-into-infinity", "absolute(x) < CARRY", "absolute(x) <= CARRY"),
        ("bf16-ties-down", "0x7FFF + ((bits >> 16) & 1)", "0x7FFF"),
        ("bf16-ties-up", "0x7FFF + ((bits >> 16) & 1)", "0x8000"),
    ),
    *faults(
        "storage/small.py",
        "numerics/test_formats.py",
        ("small-overflows", "where(magnitude < largest, magnitude, largest)", "magnitude"),
        (
            "small-nan-is-infinite",
            "where(x == x, inf_code, nan_code))\n    return code | ((bits_of(x) & 0x80000000) >> sign_shift)\n\n",
            "inf_code)\n    return code | ((bits_of(x) & 0x80000000) >> sign_shift)\n\n",
        ),
        ("small-half-a-draw", "high_sum(steps, draw)", "high_sum(steps, draw >> 1)"),
    ),
    *faults(
        "storage/element.py",
        "backends/test_literals_and_masks.py numerics/test_ops.py backends/test_numba.py test_adamw.py",
        ("element-nonfinite-target-changes", "keeps = rule.keeps_nonfinite and slot == 0", "keeps = False"),
        (
            "element-factor-forgotten",
            "update = _decoded(rule.formula, len(rule.scalars), codecs, written if scaled else None)",
            "update = _decoded(rule.formula, len(rule.scalars), codecs, None, scaled)",
        ),
    ),
    *faults(
        "backends/numba/trace.py",
        "numerics/test_ops.py backends/test_numba.py",
        (
            "trace-not-equal-is-ordered",
            'self.builder.fcmp_unordered if how == "!="',
            'self.builder.fcmp_ordered if how == "!="',
        ),
        (
            "trace-shift-keeps-the-sign",
            "self.builder.lshr(self.value, self._other(n))",
            "self.builder.ashr(self.value, self._other(n))",
        ),
    ),
    *faults(
        "formula/compose.py",
        "test_compose.py",
        (
            "compose-axes-keep-their-names",
            "(names.get(name, name), axis) for name, axis in self.axes",
            "(name, axis) for name, axis in self.axes",
        ),
        ("compose-unused-parts", "if not needed & {*each.outputs}:", "if not needed | {*each.outputs}:"),
        (
            "compose-missing-results",
            "if missing := [name for name in written if name not in given]:",
            "if missing := [name for name in written if name in given and False]:",
        ),
    ),
    *faults(
        "formula/rule.py",
        "test_compose.py",
        ("rule-surplus-scalars", "if scalars.keys() != set(names):", "if not scalars.keys() >= set(names):"),
        ("rule-missing-scalars", "if scalars.keys() != set(names):", "if not scalars.keys() <= set(names):"),
    ),
    *faults(
        "rules/parts.py",
        "rules/test_references.py test_adamw.py",
        ("parts-no-coupled-decay", "return g + decay * p", "return g + decay * p * 0.0"),
        ("parts-no-decoupled-decay", "return p - (decay * p + u)", "return p - u"),
        ("parts-v-keeps", "return beta2 * v + one_minus_beta2 * g * g", "return v + one_minus_beta2 * g * g"),
        ("parts-m-keeps", "return m + one_minus_beta1 * (g - m)", "return m + one_minus_beta1 * g"),
        ("parts-average-keeps", "return beta1 * m + share * u", "return m + share * u"),
    ),
    *faults(
        "rules/adamw.py",
        "rules/test_references.py test_adamw.py",
        ("adamw-amsgrad-takes-v", 'adam_direction.of(v="v_max")', 'adam_direction.of(v="v")'),
    ),
    *faults(
        "rules/adam.py",
        "rules/test_references.py",
        ("adam-amsgrad-takes-v", 'adam_direction.of(v="v_max")', 'adam_direction.of(v="v")'),
    ),
    *faults(
        "rules/sgd.py",
        "rules/test_references.py",
        ("sgd-nesterov-no-look-ahead", "return g + momentum * b", "return g"),
        ("sgd-share-forgotten", "return momentum * b + share * g", "return momentum * b + g"),
    ),
    *faults(
        "rules/lion.py",
        "rules/test_references.py",
        ("lion-m-by-beta1", 'interpolated.of(one_minus_beta1="one_minus_beta2")', "interpolated"),
    ),
    *faults(
        "rules/signsgd.py",
        "rules/test_references.py",
        ("signum-takes-the-gradient", 'signed.of(u="b").to("u")', 'signed.of(u="g").to("u")'),
    ),
    *faults(
        "rules/factored.py",
        "rules/test_references.py rules/test_factored.py",
        ("factored-without-floor", "(gain * mean + floor)", "(gain * mean)"),
        ("factored-floor-is-scaled", "(gain * mean + floor)", "gain * (mean + floor)"),
        (
            "factored-mean-by-the-other-size",
            "total / passes.kind.extent(dim, over)",
            "total / passes.kind.extent(-3 - dim, over)",
        ),
        ("factored-correction-forgotten", 'exact_col / passes.spread(correction, "cols")', "exact_col"),
        ("factored-whole-without-floor", "(g * g + floor)", "(g * g)"),
        ("factored-whole-v-keeps", "return beta2 * v + one_minus_beta2 *", "return v + one_minus_beta2 *"),
    ),
    *faults(
        "formula/factors.py",
        "rules/test_references.py rules/test_factored.py backends/test_matrices.py",
        ("factors-no-columns", "return r * c * g", "return r * g"),
        ("factors-deviation-added", "product(g, r, c) - m * factor", "product(g, r, c) + m * factor"),
        ("factors-confidence-of-rows", "return s * d", "return s"),
    ),
    *faults(
        "backends/numba/matrix_body.py",
        "backends/test_matrices.py",
        ("sums-lanes-of-the-last-row", "values[k * PIECE + j] = 0.0", "values[k * PIECE + j] += 0.0"),
        ("sums-rows-of-the-remainder", "for i in range(k + 1):", "for i in range(k):"),
        ("sums-lanes-in-a-row", "lanes[j % LANES] += x[first + j]", "lanes[0] += x[first + j]"),
        ("sums-columns-of-one-strip", "while left > 1:", "while left > 1000000:"),
    ),
    *faults(
        "backends/eager_sums.py",
        "backends/test_matrices.py",
        (
            "eager-sums-halves-of-lanes",
            "lanes[..., 0::2] + lanes[..., 1::2]",
            "lanes[..., : lanes.shape[-1] // 2] + lanes[..., lanes.shape[-1] // 2 :]",
        ),
        ("eager-factors-by-row-shifted", "[t[row] for t in by_row]", "[t[row // 2] for t in by_row]"),
    ),
    *faults(
        "passes.py",
        "rules/test_factored.py rules/test_references.py test_optimizer.py rules/test_prodigy.py",
        (
            "passes-first-step-for-all",
            "return self.kind.vector([distinct[int(step)] for step in self.steps])",
            "return self.kind.vector([distinct[int(self.steps[0])] for step in self.steps])",
        ),
        ("passes-copies-are-lost", "original.copy_(copy)", "copy.copy_(original)"),
        ("passes-every-element-sampled", "return column if every == 1 else", "return column if every >= 1 else"),
    ),
]
