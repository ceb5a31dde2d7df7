"""Muon: momentum, orthogonalised; AdamW for what is not a matrix."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from subulp.batch import Batch
from subulp.formula.compose import compose
from subulp.formula.rule import Rule, State
from subulp.optimizer import Optimizer, Params
from subulp.options import (
    Options,
    as_real,
    check_betas,
    check_counter,
    check_flag,
    check_fraction,
    check_nonnegative,
    one_of,
    optional,
    tuple_of,
)
from subulp.passes import Passes
from subulp.rules.adamw import PLAIN as ADAMW
from subulp.rules.adamw import scalars_of
from subulp.rules.muon_groups import VIEWS, checked_adam, checked_grouping, matrices_of, split
from subulp.rules.parts import decayed, interpolated, scaled
from subulp.sharding import part_of, whole_of
from subulp.staged import StagedOptimizer

BATCH = 1 << 24
"""Elements of the matrices that are orthogonalised together, at most."""


MUON = compose(
    scaled.of(u="o", scale="step_size"),
    decayed.of(u="o"),
    interpolated.of(m="b", one_minus_beta1="one_minus_momentum"),
    states={"b": State("momentum_buffer")},
    reads=("g", "o"),
)


def _check_real(what: str, value: Any) -> Any:
    as_real(what, value)
    return value


def _check_steps(what: str, value: Any) -> int:
    if check_counter(what, value, 32) >= 100:
        raise ValueError(f"{what}={value!r}: must be below 100.")
    return int(value)


class Muon(StagedOptimizer):
    r"""Momentum orthogonalised by Newton-Schulz, with the semantics of ``torch.optim.Muon``; AdamW for other groups.

    For a matrix, in fp32, with gradient :math:`g` and stored :math:`p, b`:

    .. math::
        b' &= b + (1-\mu)(g - b) \qquad u = g + \mu(b' - g) \quad (\text{without nesterov } u = b') \\
        O &= \mathrm{NS}(u) \qquad p' = p - \eta\lambda p - \eta\, r\, O

    stored as :math:`\mathrm{SR}(p'), \mathrm{SR}(b')`. NS is the quintic Newton-Schulz iteration in bf16, as in torch;
    matrices of one shape are iterated together. r is :math:`\sqrt{\max(1, \text{rows}/\text{columns})}` or, with
    ``adjust_lr_fn="match_rms_adamw"``, :math:`0.2\sqrt{\max(\text{rows}, \text{columns})}`.

    A parameter with more dimensions is refused unless ``view`` says which matrices it holds: with "flatten" one,
    (first dimension, all others), as for the weight of a convolution; with "stack" one for each index of its leading
    dimensions, as for experts of shape (experts, out, in), each with a norm of its own; with "auto" a stack if it has three
    dimensions, else flattened. Rows and columns in r are those of these matrices.

    Groups with ``use_muon=False`` (or ``optim_type`` "adam" or "adamw") take :class:`subulp.AdamW`'s update with their
    ``betas`` and ``eps`` (1e-8 unless given)::

        subulp.Muon([{"params": matrices}, {"params": rest, "use_muon": False, "lr": 3e-4}], lr=0.02)

    ``grouping="auto"`` makes such groups of any parameters, and of every group given, that says neither::

        subulp.Muon(model.named_parameters(), lr=0.02, grouping="auto", adam={"lr": 3e-4, "weight_decay": 0.0})

    To AdamW go parameters that have no matrix under ``view`` (biases, norms, scalars) and, by their names, biases, norms,
    embeddings and output heads. Parameters without names go by shape: a matrix of 30000 rows and 256 columns or more is
    taken for an embedding or a head. All others go to Muon.

    Matrix products are not the same bits on every device and library, so neither is O; for one device they are, and the
    noise of the stores is the same everywhere. A sharded matrix (FSDP2, tensor parallel) is gathered, and every process
    orthogonalises the whole.

    Args:
        params: tensors, ``(name, tensor)`` pairs or groups, as in ``torch.optim``.
        lr: :math:`\eta`.
        weight_decay: :math:`\lambda`.
        momentum: :math:`\mu` in [0, 1).
        nesterov: see above.
        ns_coefficients: of the iteration.
        eps: the least norm by which u is divided (in AdamW groups AdamW's eps).
        ns_steps: iterations, below 100.
        adjust_lr_fn: None or "original", or "match_rms_adamw", see above.
        betas: of AdamW groups.
        use_muon: the default of groups.
        view: "matrix", "flatten", "stack" or "auto", see above.
        grouping: None or "auto" (or True), see above.
        adam: settings of AdamW groups that do not bring them: ``lr``, ``betas``, ``eps``, ``weight_decay`` and options. For
            the AdamW part of a group that is split they win over the group's, which are Muon's.
        options: the options that every optimizer shares, see :class:`subulp.options.Options`.

    State, per parameter: ``step`` (0-d fp32), ``momentum_buffer`` (or ``exp_avg``, ``exp_avg_sq``), dtypes by
    ``state_dtype``; ``stream`` (int). Checkpoints of ``torch.optim.Muon`` load.

    Raises:
        ValueError: a parameter in a Muon group has no matrix under ``view``.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); ``torch.optim.Muon``;
    ``match_rms_adamw``: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982).
    """

    hyperparameters: ClassVar[dict[str, Any]] = {
        "weight_decay": check_nonnegative,
        "momentum": check_fraction,
        "nesterov": check_flag,
        "ns_coefficients": tuple_of(_check_real, _check_real, _check_real),
        "eps": check_nonnegative,
        "ns_steps": _check_steps,
        "adjust_lr_fn": optional(one_of("original", "match_rms_adamw")),
        "betas": check_betas,
        "use_muon": check_flag,
        "view": one_of(*VIEWS),
    }

    _grouping = False
    _adam: Mapping[str, Any] = MappingProxyType({})

    own_settings = ("_grouping", "_adam")

    def __init__(
        self,
        params: Params,
        lr: float | Any = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: Sequence[float] = (0.9, 0.95),
        use_muon: bool = True,
        view: str = "matrix",
        grouping: str | bool | None = None,
        adam: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "view": view,
        }
        self._grouping = checked_grouping(grouping)
        # Not among the defaults: schedulers that cycle a momentum would take these for it (CyclicLR looks for "betas").
        self._adam = {"betas": check_betas("betas", betas), **checked_adam(adam)}
        super().__init__(params, defaults, options)
        if self._grouping and not any(group["use_muon"] for group in self.param_groups):
            warnings.warn(
                "grouping='auto' found no matrix for Muon: every parameter takes AdamW's update. FSDP1 and ZeRO flatten "
                "parameters; use FSDP2, or view='auto' if they have more than two dimensions.",
                stacklevel=2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch, or with ``grouping="auto"`` its two parts; nothing changes on error."""
        if not self._grouping or "use_muon" in param_group or "optim_type" in param_group:
            self._add(param_group)
            return
        groups = len(self.param_groups)
        try:
            for part in split(param_group, self._adam, param_group.get("view", self.defaults["view"])):
                self._add(part)
        except Exception:
            del self.param_groups[groups:]
            raise

    def _add(self, param_group: dict[str, Any]) -> None:
        kind = param_group.get("optim_type")
        if isinstance(kind, str):
            param_group.setdefault("use_muon", not kind.lower().startswith("adam"))
        if not param_group.get("use_muon", self.defaults["use_muon"]):
            for key, value in {"eps": 1e-8, **self._adam}.items():
                param_group.setdefault(key, value)
        super().add_param_group(param_group)

    def _check(self, group: dict[str, Any], where: str) -> None:
        super()._check(group, where)
        self._check_shapes(group, [p for p in group.get("params", ()) if p.requires_grad or p.grad is not None], where)

    def _check_shapes(self, group: dict[str, Any], params: Sequence[Tensor], where: str) -> None:
        for p in params:
            if group["use_muon"] and matrices_of(p.shape, group["view"]) is None:
                cure = (
                    ", or pass view='flatten' (a convolution's weight as one matrix) or view='stack' (a stack of them)"
                )
                raise ValueError(
                    f"A parameter has shape {tuple(p.shape)}{where}: Muon orthogonalises matrices. Put it in a group with "
                    f"use_muon=False, which is updated as by AdamW (grouping='auto' does){cure if p.dim() > 2 else ''}."
                )

    def rule(self, group: dict[str, Any]) -> Rule:
        return MUON if group["use_muon"] else ADAMW

    def scalars(self, group: dict[str, Any], step: Any) -> dict[str, Any]:
        return scalars_of(group, step)  # of AdamW groups

    def _kind(self, group: dict[str, Any]) -> Any:
        return super()._kind(group) if group["use_muon"] else Optimizer._kind(self, group)

    def _prepared(self, batch: Batch) -> Callable[[], None]:
        if not batch.group["use_muon"]:
            return Optimizer._prepared(self, batch)
        self._check_shapes(batch.group, batch.params, batch.places[0])
        return super()._prepared(batch)

    def update(self, passes: Passes) -> None:
        group = passes.group
        lr = float(group["lr"])
        for chosen in _batches(passes):
            batch = passes.only(chosen)
            shape = batch.kind.shapes[0]
            view = cast(tuple[int, int, int], matrices_of(shape, group["view"]))  # checked before the step
            directions = zip(self._directions(batch), batch.params, strict=True)
            whole = torch.cat([whole_of(own, p).bfloat16().reshape(view) for own, p in directions])
            results = _orthogonal(whole, group).reshape(len(chosen), *shape)
            scalars = {
                "decay": lr * group["weight_decay"],
                "step_size": lr * _adjustment(group, view[1:]),
                "one_minus_momentum": 1 - group["momentum"],
            }
            parts = [part_of(o, p).contiguous() for o, p in zip(results, batch.params, strict=True)]
            batch.apply(MUON, scalars, reads={"o": parts})

    @staticmethod
    def _directions(passes: Passes) -> list[Tensor]:
        """What is to be orthogonalised, in fp32: this process's parts."""
        group = passes.group
        momentum = float(group["momentum"])
        grads = [g.to(passes.kind.dtype) * passes.factor for g in passes.column("g")]
        kept = [b.to(passes.kind.dtype) for b in passes.column("momentum_buffer")]
        moved = [interpolated(b, g, 1 - momentum) for b, g in zip(kept, grads, strict=True)]
        return [g + momentum * (b - g) for b, g in zip(moved, grads, strict=True)] if group["nesterov"] else moved


def _batches(passes: Passes) -> Iterator[list[int]]:
    """The numbers of parameters of one shape, in the order of their first ones, at most BATCH elements together."""
    alike: dict[Any, list[int]] = {}
    for i, shape in enumerate(passes.kind.shapes):
        alike.setdefault(shape, []).append(i)
    for shape, members in alike.items():
        size = max(1, BATCH // math.prod(shape))
        yield from (members[i : i + size] for i in range(0, len(members), size))


def _orthogonal(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Of (batch, rows, columns), at most BATCH elements together, since a stack of experts may be larger."""
    parts = matrices.split(max(1, BATCH // matrices[0].numel()))
    done = [_newton_schulz(part, group["ns_coefficients"], group["ns_steps"], group["eps"]) for part in parts]
    return done[0] if len(done) == 1 else torch.cat(done)


def _newton_schulz(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """The iteration ``x <- a x + (b G + c G^2) x`` with ``G = x x^T`` on matrices (batch, rows, columns) of norm 1."""
    a, b, c = map(float, coefficients)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _adjustment(group: dict[str, Any], shape: Sequence[int]) -> float:
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1.0, shape[0] / shape[1]))
