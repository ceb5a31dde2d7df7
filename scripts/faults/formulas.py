"""Faults in the rules: terms dropped, the wrong moment, a scalar that ignores its hyper-parameter."""

from __future__ import annotations

from faults import faults

_REFERENCES = "rules/test_references.py"

MUTANTS = [
    *faults(
        "rules/adamw.py",
        _REFERENCES,
        ("adamw-no-eps", "sqrt(v) * rsqrt_bias2 + eps", "sqrt(v) * rsqrt_bias2"),
        ("adamw-eps-corrected-too", "sqrt(v) * rsqrt_bias2 + eps", "(sqrt(v) + eps) * rsqrt_bias2"),
        ("adamw-no-correction-of-m", "lr / (1 - beta1**step)", "lr"),
        ("adamw-correction-of-v-no-root", "(1 - beta2**step) ** -0.5", "(1 - beta2**step) ** -1.0"),
        ("adamw-decay-without-lr", 'lr * group["weight_decay"],', 'group["weight_decay"],'),
        ("adamw-rule-ignores-amsgrad", 'AMSGRAD if group["amsgrad"] else PLAIN', "PLAIN"),
    ),
    *faults(
        "rules/adam.py",
        _REFERENCES,
        ("adam-decoupled-without-amsgrad", 'DECOUPLED_AMSGRAD if group["amsgrad"] else DECOUPLED', "DECOUPLED"),
    ),
    *faults(
        "rules/sgd.py",
        _REFERENCES,
        ("sgd-nesterov-as-momentum", 'NESTEROV if group["nesterov"] else MOMENTUM', "MOMENTUM"),
        ("sgd-dampened-at-once", "* (step > 1)", "* (step > 0)"),
        ("sgd-dampened-never", "* (step > 1)", "* (step < 1)"),
        ("sgd-dampened-once", "* (step > 1)", "* (step == 2)"),
    ),
    *faults(
        "rules/lion.py",
        _REFERENCES,
        ("lion-direction-by-beta2", "sign(m + one_minus_beta1 * (g - m))", "sign(m + one_minus_beta2 * (g - m))"),
    ),
    *faults(
        "rules/signsgd.py",
        _REFERENCES,
        ("signum-as-signsgd", 'PLAIN if group["momentum"] == 0 else MOMENTUM', "PLAIN"),
    ),
    *faults(
        "rules/adafactor.py",
        _REFERENCES,
        ("adafactor-momentum-whole-share", "(1 - beta1) * lr / clip", "lr / clip"),
        ("adafactor-clips-always", '["clip_threshold"]).clamp(min=1.0)', '["clip_threshold"]).clamp(min=0.01)'),
        ("adafactor-clips-never", '["clip_threshold"]).clamp(min=1.0)', '["clip_threshold"]).clamp(max=1.0)'),
        ("adafactor-beta2-of-next-step", "1 - step **", "1 - (step + 1) **"),
        ("adafactor-torch-decay-by-step", 'group["lr"] if group["semantics"] == "torch" else lr', "lr"),
        ("adafactor-no-least-size", 'rms.clamp(min=group["eps"][1]) if', "rms if"),
        ("adafactor-warmup-stands", "1e-6 * step if", "1e-6 if"),
        ("adafactor-torch-rate-does-not-fall", "min(size, 1 / math.sqrt(step))", "size"),
        ("adafactor-torch-squares-plus-eps", "floor, clamp = 0.0, torch", "floor, clamp = floor or 0.0, torch"),
    ),
    *faults(
        "rules/factored.py",
        _REFERENCES,
        ("factored-mean-not-clamped", "mean_row.clamp(min=clamp)", "mean_row"),
    ),
    *faults(
        "rules/came.py",
        _REFERENCES,
        ("came-deviation-scale", "scale=(beta1 / clip) ** 2", "scale=(1.0 / clip) ** 2"),
        ("came-not-clipped", "(1 - beta1) / clip", "(1 - beta1)"),
        ("came-one-eps-for-both", 'group["eps"][1]', 'group["eps"][0]'),
        ("came-one-beta-for-both", '"exp_avg_res",\n            beta3', '"exp_avg_res",\n            beta2'),
    ),
    *faults(
        "rules/muon.py",
        "rules/test_muon.py",
        ("muon-ratio-upside-down", "max(1.0, shape[0] / shape[1])", "max(1.0, shape[1] / shape[0])"),
        ("muon-rms-by-the-shorter-side", "0.2 * math.sqrt(max(shape))", "0.2 * math.sqrt(min(shape))"),
        ("muon-no-eps", "keepdim=True).clamp(min=eps)", "keepdim=True).clamp(min=1e-7)"),
        ("muon-adamw-eps", '{"eps": 1e-8, **', '{"eps": 1e-3, **'),
        ("muon-order-of-coefficients", "beta=b, alpha=c", "beta=c, alpha=b"),
    ),
    *faults(
        "rules/prodigy.py",
        _REFERENCES,
        ("prodigy-m-not-by-d", "d * (1 - beta1),", "(1 - beta1),"),
        ("prodigy-v-by-d-once", "d * d * (1 - beta2)", "d * (1 - beta2)"),
        ("prodigy-decay-without-rate", 'rate * decay if group["decouple"]', 'decay if group["decouple"]'),
        ("prodigy-eps-not-by-d", 'd * group["eps"]', 'group["eps"]'),
        ("prodigy-numerator-keeps", 'beta3 * group["d_numerator"]', 'group["d_numerator"]'),
        ("prodigy-grows-at-once", 'torch.minimum(d_max, first * group["growth_rate"])', "d_max"),
        ("prodigy-first-growth-from-d0", "torch.where(d == d0, torch.maximum(d, d_hat), d)", "d"),
        ("prodigy-no-safeguard", 'd if group["safeguard_warmup"] else rate', "rate"),
        ("prodigy-correction-by-one-beta", "/ (1 - beta1**k)", "/ (1 - beta2**k)"),
        ("prodigy-no-coefficient", 'group["d_coef"] * numerator', "numerator"),
        (
            "prodigy-beta3-ignored-in-s",
            "beta3 = math.sqrt(beta2) if group",
            "beta3 = math.sqrt(beta2) if True or group",
        ),
    ),
]
