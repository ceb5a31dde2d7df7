"""subulp's classes in the place of torch's, over torch's own tables: values, options, gradients, kinds of parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.bits import same_bits
from tests.models import everything, make_params, set_grads
from tests.torch_tables import SWAPS, Model, Swap, all_swaps, differs, elementwise_swaps

STEPS = 7
WITHOUT_GRADIENTS = (2, 4)
"""Steps at which all and at which the first parameter lack a gradient."""


def shapes(swap: Swap) -> tuple[tuple[int, ...], ...]:
    matrices: tuple[tuple[int, ...], ...] = ((3, 5), (6, 4))
    if swap.matrices:
        return matrices
    return (*matrices, (7,), (), (2, 3, 2), *(() if differs("zero size", swap.name) else ((0,), (0, 3))))


def set_some_grads(params: Sequence[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        absent = step == WITHOUT_GRADIENTS[0] or (step == WITHOUT_GRADIENTS[1] and i == 0)
        p.grad = None if absent else grad


def tolerance(swap: Swap, dtype: torch.dtype) -> float:
    if swap.matrices:
        # The iteration is bf16: where momenta differ by an ulp a bf16 number may round the other way, 2**-8 of an entry of
        # O, whose entries are at most 1.3 (7 with the table's other coefficients); the iteration may amplify that
        # fourfold. Rates are at most 0.01, times sqrt(3/2).
        return STEPS * 0.01 * 1.5**0.5 * 7 * 4 * 2.0**-8
    # In each step up to 4 roundings of a parameter, which is below 8, or of an update that is smaller than it by the rate
    # (at most 0.01, times 1 / (1 - momentum) = 10) and has at most 40 roundings itself.
    return STEPS * 8 * 4 * torch.finfo(dtype).eps


def test_reading_the_tables_leaves_torchs_flags_alone():
    assert list(SWAPS[0].inputs())
    assert not torch.backends.flags_frozen()


@all_swaps
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_torchs(swap, dtype):
    for description, kwargs in swap.inputs():
        params, reference = make_params(shapes(swap), dtype), make_params(shapes(swap), dtype)
        flags = {"foreach": False} if swap.name != "Muon" else {}
        opt, other = swap.pair(params, reference, kwargs | flags)
        for step in range(STEPS):
            set_some_grads(params, step)
            set_some_grads(reference, step)
            opt.step()
            other.step()
        for p, q in zip(params, reference, strict=True):
            difference = (p - q).abs()
            assert p.dtype == dtype
            assert not difference.numel() or difference.max() < tolerance(swap, dtype), description
        if differs("state names", swap.name):
            continue
        for p, q in zip(params, reference, strict=True):
            for name, value in other.state[q].items():
                if isinstance(value, Tensor) and value.numel():
                    mine = opt.state[p][name]
                    # Moments: at most 6 roundings a step of values below 8 squared, 80 with SGD's sum of ten gradients.
                    assert (mine - value).abs().max() < STEPS * 6 * 80 * torch.finfo(dtype).eps, (description, name)
                    assert mine.dtype == value.dtype or name == "step", (description, name)


@all_swaps
def test_groups_have_torchs_keys_and_defaults(swap):
    opt, other = swap.pair(make_params(((2, 2),)), make_params(((2, 2),)), {})
    for key, value in other.defaults.items():
        if differs("group key", f"{swap.name} {key}"):
            continue
        name = swap.renamed.get(key, key)
        assert (name == key) is not differs("keyword", key)
        assert opt.defaults[name] == value, key
        assert opt.param_groups[0][name] == value, key


@elementwise_swaps
def test_tensors_as_hyperparameters(swap):
    """torch's inputs for GPUs: tensor rates and betas, also of several dimensions, with capturable."""
    for description, kwargs in swap.inputs("cuda"):
        params, reference, plain = (make_params(shapes(swap), torch.float32) for _ in range(3))
        theirs = {k: v for k, v in kwargs.items() if k != "capturable" or not differs("capturable", "cpu")}
        opt, other = swap.pair(params, reference, kwargs)[0], swap.theirs(reference, **copy.deepcopy(theirs))
        numbers = {k: float(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        if "betas" in kwargs:
            numbers["betas"] = tuple(float(beta) for beta in kwargs["betas"])
        same = swap.make(plain, **numbers)
        for step in range(STEPS):
            for ps, optimizer in ((params, opt), (reference, other), (plain, same)):
                set_some_grads(ps, step)
                optimizer.step()
        for p, q, r in zip(params, reference, plain, strict=True):
            assert same_bits(p, r), description
            assert not p.numel() or (p - q).abs().max() < tolerance(swap, torch.float32), description


@all_swaps
def test_tensor_rates_give_the_bits_of_floats(swap):
    for description, kwargs in swap.flagged():
        results = []
        for lr in (1e-3, torch.tensor(1e-3, dtype=torch.float64), torch.tensor([1e-3], dtype=torch.float64)):
            model = Model(swap.matrices)
            model.train(swap.make(model.params, **{**kwargs, "lr": lr}), 5)
            results.append(model.params)
        for other in results[1:]:
            assert all(map(same_bits, results[0], other)), description


@all_swaps
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_foreach_and_fused_change_nothing(swap, dtype):
    sizes = (*shapes(swap), (0, 3))
    for description, kwargs in swap.inputs():
        results = []
        for flags in ({}, {"foreach": True}, {"foreach": False, "fused": True}, {"foreach": None, "fused": False}):
            params = make_params(sizes, dtype)
            opt = swap.make(params, **kwargs, **flags)
            for step in range(3):
                set_some_grads(params, step)
                opt.step()
            results.append(everything(opt, params))
        for other in results[1:]:
            assert all(map(same_bits, results[0], other)), description


@all_swaps
@pytest.mark.parametrize(
    ("contiguous", "scheduled"), [(True, False), (False, True)], ids=["plain", "strided, scheduled"]
)
@pytest.mark.filterwarnings("ignore:.*pass tensor.*:UserWarning")
def test_losses_move_the_right_way(swap, contiguous, scheduled):
    for together in swap.schedulers() if scheduled else [[]]:
        for description, kwargs in swap.inputs():
            model = Model(swap.matrices, contiguous=contiguous)
            opt = swap.make(model.params, **kwargs)
            schedulers = [make(opt) for make in together]
            first = model.closure().item()
            for _ in range(10):
                loss = opt.step(model.closure)
                assert isinstance(loss, Tensor)
                for scheduler in schedulers:
                    scheduler.step(loss.item()) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
            last = model.closure().item()
            assert last > first if kwargs.get("maximize") else last < first, description


@all_swaps
def test_groups_have_their_own_rates_and_decay(swap):
    for description, kwargs in swap.flagged():
        model, still = Model(swap.matrices), Parameter(torch.ones(2, 2))
        before = still.detach().clone()
        named = {swap.renamed.get(key, key): value for key, value in kwargs.items()}
        groups = [{"params": [p], "lr": 1e-3, **named} for p in model.params]
        groups[-1]["weight_decay"] = 0.0
        opt = swap.make([*groups, {"params": [still]}], lr=1e-28)
        first = model.closure().item()
        for _ in range(10):
            still.grad = torch.ones_like(still)
            opt.step(model.closure)
        last = model.closure().item()
        assert last > first if kwargs.get("maximize") else last < first, description
        assert same_bits(still.detach(), before), description


@all_swaps
def test_steps_without_or_with_zero_gradients_are_idle(swap):
    for description, kwargs in swap.flagged():
        for grad in (None, torch.zeros(5, 1)):
            # torch's AdamW and Muon decay by default.
            p = Parameter(torch.randn(5, 1))
            opt = swap.make(
                [p], **{**kwargs, "weight_decay": 0.0 if grad is not None else kwargs.get("weight_decay", 0)}
            )
            before, p.grad = p.detach().clone(), grad
            assert opt.step(lambda: 1.5) == 1.5
            assert same_bits(p.detach(), before), description
            assert swap.name in repr(opt)


@all_swaps
def test_gradients_are_not_written_to(swap):
    for description, kwargs in swap.flagged():
        params = make_params(shapes(swap), torch.float32)
        set_grads(params, 0)
        versions = [p.grad._version for p in params]
        swap.make(params, **kwargs).step()
        assert [p.grad._version for p in params] == versions, description


@all_swaps
def test_every_parameter_has_state_after_a_step(swap):
    for description, kwargs in swap.inputs():
        params = make_params(shapes(swap), torch.float32)
        opt = swap.make(params, **kwargs)
        set_grads(params, 0)
        opt.step()
        assert all(len(opt.state[p]) > 0 for p in params), description


@all_swaps
def test_sparse_gradients_are_refused_as_in_torch(swap):
    p, q = Parameter(torch.ones(4, 2)), Parameter(torch.ones(4, 2))
    opt, other = swap.pair([p], [q], {})
    p.grad = q.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step()
    assert not opt.state[p]
    if not differs("sparse", swap.name):
        with pytest.raises(RuntimeError, match="sparse"):
            other.step()


@elementwise_swaps
def test_complex_parameters_are_pairs_of_reals(swap):
    for description, kwargs in swap.flagged():
        kinds = (torch.complex64, torch.complex64, torch.float32)
        params = [make_params((s,), kind)[0] for s, kind in zip(((10, 5), (10,), (10, 5)), kinds, strict=True)]
        real = [
            Parameter(torch.view_as_real(p.detach()).clone() if p.is_complex() else p.detach().clone()) for p in params
        ]
        theirs = [Parameter(p.detach().clone()) for p in params]
        opts = swap.make(params, **kwargs), swap.make(real, **kwargs)
        other = swap.theirs(theirs, **{**kwargs, "fused": None})
        for step in range(3):
            set_grads(params, step)
            for p, q, r in zip(params, real, theirs, strict=True):
                q.grad = torch.view_as_real(p.grad).clone() if p.is_complex() else p.grad.clone()
                r.grad = p.grad.clone()
            for opt in (*opts, other):
                opt.step()
            for p, q, r in zip(params, real, theirs, strict=True):
                view = torch.view_as_real(p.detach()) if p.is_complex() else p.detach()
                assert same_bits(view, q.detach()), description
                assert (p - r).abs().max() < tolerance(swap, torch.float32), description


@pytest.mark.parametrize("swap", SWAPS, ids=repr)
def test_errors_have_torchs_types(swap):
    wrong: dict[str, str] = {}
    for description, params, kwargs, expected, at_construction in swap.errors():
        if differs("error", description):
            continue
        # torch passes None for parameters where the keyword is wrong; its classes read the keywords first.
        given = [Parameter(torch.ones(1, 1))] if params is None else params
        found: Any = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                opt = swap.make(given, **kwargs)
            if not at_construction:
                opt.step()
        except (Exception, UserWarning) as error:
            found = error
        if type(found) is not expected:
            wrong[description] = f"{expected.__name__} expected, found {found!r}"
    assert not wrong, "\n".join(f"{key}: {value}" for key, value in wrong.items())


@all_swaps
def test_deliberately_accepted_inputs_still_train(swap):
    """What torch refuses and we take is not merely swallowed: it does what the plain input does."""
    for description, _, kwargs, _, _ in swap.errors():
        if not differs("error", description):
            continue
        plain = {k: float(v) if isinstance(v, Tensor) else v for k, v in kwargs.items() if k != "foreach"}
        if "betas" in kwargs:
            plain["betas"] = tuple(float(beta) for beta in kwargs["betas"])
        results = []
        for options in (kwargs, plain):
            params = make_params(((3, 5),), torch.float32)
            opt = swap.make(params, **options)
            set_grads(params, 0)
            opt.step()
            results.append(params[0])
        assert same_bits(*results), description
