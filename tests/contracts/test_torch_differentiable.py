"""differentiable=True, as torch's own tests use it: gradients of a step in its inputs, states and hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tests.torch_tables import ELEMENTWISE, Swap, differs, elementwise_swaps

# Parameters in a graph are no leaves; torch's step reads their grad too. Reference cycles are the caller's choice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
]

Make = Callable[..., torch.optim.Optimizer]

N = 6
MOMENTS = ("exp_avg", "exp_avg_sq")
STATES = {
    "SGD": lambda options: ("momentum_buffer",),
    "Adam": lambda options: (*MOMENTS, *(("max_exp_avg_sq",) if options.get("amsgrad") else ())),
    "AdamW": lambda options: (*MOMENTS, *(("max_exp_avg_sq",) if options.get("amsgrad") else ())),
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "dampening": 0.5},
    ],
    "Adam": [
        {"amsgrad": True},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    "AdamW": [{"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}, {"weight_decay": 0.0}],
}
STEP_CASES = [(swap, options) for swap in ELEMENTWISE for options in OPTIONS[swap.name]]

ADAM_TENSORS = [("lr",), ("weight_decay",), ("beta1", "beta2"), ("lr", "weight_decay", "beta1", "beta2")]
SGD_TENSORS = [("lr",), ("weight_decay",), ("lr", "weight_decay")]
TENSOR_CASES = [(s, names) for s in ELEMENTWISE for names in (SGD_TENSORS if s.name == "SGD" else ADAM_TENSORS)]
VALUES = {"lr": 0.01, "weight_decay": 0.3, "beta1": 0.9, "beta2": 0.99}


def draw(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(N, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def states_of(swap: Swap, options: dict[str, Any]) -> dict[str, Tensor]:
    return {name: draw(10 + i) for i, name in enumerate(STATES[swap.name](options))}


def fill(opt: torch.optim.Optimizer, p: Tensor, names: Sequence[str], values: Sequence[Tensor], steps: bool) -> None:
    """A state written by hand, copies that the step may write into."""
    entry = {"step": torch.tensor(10.0, dtype=torch.float64)} if steps else {}
    entry.update((name, value.clone()) for name, value in zip(names, values, strict=True))
    opt.state[p].update(entry)


def recorded(opt: torch.optim.Optimizer, p: Tensor) -> tuple[Tensor, ...]:
    """The state tensors that are part of the graph, in the order of their names."""
    entry = opt.state[p]
    return tuple(
        entry[k] for k in sorted(entry) if isinstance(entry[k], Tensor) and entry[k].requires_grad and k != "step"
    )


def one_step(make: Make, name: str, options: dict[str, Any], names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    def function(p: Tensor, grad: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        p = p.clone()
        p.grad = grad
        opt = make([p], lr=0.9, differentiable=True, **options)
        fill(opt, p, names, states, steps=name != "SGD")
        opt.step()
        return (p, *recorded(opt, p))

    return function


@pytest.mark.parametrize(("swap", "options"), STEP_CASES, ids=repr)
def test_a_step_has_gradients_in_parameter_gradient_and_states(swap, options):
    states = states_of(swap, options)
    inputs = (draw(0), draw(1), *states.values())
    assert gradcheck(one_step(swap.make, swap.name, options, list(states)), inputs)


@pytest.mark.parametrize(("swap", "options"), STEP_CASES, ids=repr)
def test_a_step_and_its_gradients_are_torchs(swap, options):
    found = []
    for make in (swap.make, swap.theirs):
        states = states_of(swap, options)
        inputs = (draw(0), draw(1), *states.values())
        outputs = one_step(make, swap.name, options, list(states))(*inputs)
        total = sum(((i + 1) * out.square().sum() for i, out in enumerate(outputs)), torch.zeros(()))
        found.append((outputs, torch.autograd.grad(total, inputs)))
    for mine, theirs in zip(*found, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            # A few dozen fp64 operations on numbers near 1; the division by sqrt(v) amplifies by at most 1/v, v > 1e-2.
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def hyperparameters(names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Any]:
    kwargs: dict[str, Any] = dict(zip(names, values, strict=True))
    if "beta1" in kwargs:
        kwargs["betas"] = (kwargs.pop("beta1"), kwargs.pop("beta2"))
    return kwargs


def descent(
    make: Make, options: dict[str, Any], names: Sequence[str], steps: int = 2, states: dict[str, Tensor] | None = None
) -> Callable[..., Any]:
    """The loss, the parameters and the states after steps of descent, as a function of start and hyper-parameters."""
    weights, goal = draw(20).detach() + 0.5, draw(21).detach() - 2

    def loss(p: Tensor) -> Tensor:
        return (weights * p - goal).square().sum() + p.prod()

    def function(p: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        p = p.clone()
        opt = make([p], differentiable=True, **{**options, **hyperparameters(names, values)})
        if states is not None:
            fill(opt, p, list(states), [t.detach() for t in states.values()], steps="momentum_buffer" not in states)
        for _ in range(steps):
            # A copy: the step writes into p, and what the loss keeps of p must not change.
            (p.grad,) = torch.autograd.grad(loss(p.clone()), p, create_graph=True)
            opt.step()
            opt.zero_grad()
        return (loss(p), p, *recorded(opt, p))

    return function


def tensors(names: Sequence[str], shape: Sequence[int] = ()) -> list[Tensor]:
    return [torch.full(tuple(shape), VALUES[name], dtype=torch.float64, requires_grad=True) for name in names]


@pytest.mark.parametrize(("swap", "names"), TENSOR_CASES, ids=repr)
def test_hyperparameters_have_gradients(swap, names):
    cases: dict[str, list[dict[str, Any]]] = {"SGD": [{}, {"momentum": 0.9}]}
    for options in cases.get(swap.name, [{"amsgrad": True}, {"weight_decay": 0.1}]):
        assert gradcheck(descent(swap.make, options, names), (draw(0), *tensors(names)))


@pytest.mark.parametrize(("swap", "names"), TENSOR_CASES, ids=repr)
def test_gradients_of_hyperparameters_are_torchs(swap, names):
    # From states that exist: torch detaches SGD's first buffer, and counts steps in fp32 unless told otherwise. One step:
    # in a second one torch's Adam overwrites what the graph of the first needs.
    assert differs("differentiable", "SGD's first momentum")
    cases: dict[str, list[dict[str, Any]]] = {"SGD": [{}, {"momentum": 0.9, "nesterov": True}]}
    for options in cases.get(swap.name, [{}, {"amsgrad": True}]):
        found = []
        for make in (swap.make, swap.theirs):
            values = tensors(names)
            loss, *_ = descent(make, options, names, 1, states_of(swap, options))(draw(0), *values)
            found.append((loss, *torch.autograd.grad(loss, values)))
        for mine, theirs in zip(*found, strict=True):
            assert theirs.abs() > 1e-6
            # As above; losses are near 100.
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-9)


@elementwise_swaps
def test_rates_of_one_element_and_one_dimension(swap):
    names = ("lr",) if swap.name == "SGD" else ("lr", "beta1", "beta2")
    found = []
    for shape in ((), (1,)):
        values = tensors(names, shape)
        loss, *_ = descent(swap.make, {}, names)(draw(0), *values)
        found.append([g.reshape(()) for g in torch.autograd.grad(loss.sum(), values)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("swap", "names"), TENSOR_CASES, ids=repr)
def test_backward_reaches_hyperparameters_as_in_torch(swap, names):
    """torch's way of meta-learning: backward into chosen tensors, with a graph, after one step and before the next."""
    found = []
    for make in (swap.make, swap.theirs):
        values = tensors(names)
        p = draw(0).clone()
        opt = make([p], differentiable=True, **hyperparameters(names, values))
        states = states_of(swap, {})
        fill(opt, p, list(states), list(states.values()), steps=swap.name != "SGD")
        for _ in range(2):
            loss = (p.sum() - 2).square()
            loss.backward(inputs=(p,), create_graph=True)
            opt.step()
            opt.zero_grad()
        loss.backward(inputs=values, create_graph=True)
        grads = [value.grad for value in values]
        found.append([grad.detach().clone() for grad in grads if grad is not None])
        assert len(found[-1]) == len(values)
        assert all(grad.requires_grad for grad in grads if grad is not None)
        for value in values:
            value.grad = None  # breaks the cycle that the graph makes
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@elementwise_swaps
def test_second_derivatives(swap):
    names = SGD_TENSORS[-1] if swap.name == "SGD" else ADAM_TENSORS[-1]
    assert gradgradcheck(descent(swap.make, {}, names), (draw(0), *tensors(names)))


@elementwise_swaps
def test_complex_parameters_have_gradients(swap):
    options = {"momentum": 0.9} if swap.name == "SGD" else {"weight_decay": 0.1}
    start = torch.view_as_complex(torch.stack([draw(0), draw(1)], -1)).detach().requires_grad_()
    grad = torch.view_as_complex(torch.stack([draw(2), draw(3)], -1)).detach().requires_grad_()

    def function(p: Tensor, grad: Tensor) -> Tensor:
        p = p.clone()
        p.grad = grad
        swap.make([p], lr=0.9, differentiable=True, **options).step()
        return p

    assert gradcheck(function, (start, grad))


@elementwise_swaps
def test_the_update_is_recorded_without_grad_mode_too(swap):
    """As in torch, whose step switches it on."""
    for make in (swap.make, swap.theirs):
        start = draw(0)
        p = start.clone()
        opt = make([p], differentiable=True)
        p.grad = draw(1).detach()
        with torch.no_grad():
            opt.step()
        (gradient,) = torch.autograd.grad(p.sum(), start)
        assert (gradient != 0).all()


@elementwise_swaps
def test_values_are_those_of_an_ordinary_step(swap):
    """The same formula in the parameter's own precision; fp64, where both compute in it."""
    for options in OPTIONS[swap.name]:
        results = []
        for differentiable in (False, True):
            p = draw(0).clone() if differentiable else draw(0).detach().requires_grad_()
            opt = swap.make([p], lr=0.01, differentiable=differentiable, **options)
            for step in range(5):
                p.grad = draw(30 + step).detach() - 0.5
                opt.step()
            results.append(p.detach())
        # Scalars may be fp64 tensors there and floats here: a rounding or two in each of five steps, on numbers below 4.
        assert (results[0] - results[1]).abs().max() < 5 * 16 * 2.0**-52


@elementwise_swaps
def test_frozen_and_empty_parameters_take_part(swap):
    used, idle, empty = (
        draw(0).clone(),
        draw(1).clone(),
        torch.zeros(0, dtype=torch.float64, requires_grad=True).clone(),
    )
    opt = swap.make([used, idle, empty], differentiable=True)
    before = idle.detach().clone()
    used.grad, empty.grad = draw(2).detach(), torch.zeros(0, dtype=torch.float64)
    opt.step()
    assert used.grad_fn is not None
    assert torch.equal(idle.detach(), before)


@elementwise_swaps
def test_leaves_are_refused_as_in_torch(swap):
    for make in (swap.make, swap.theirs):
        p = draw(0)
        opt = make([p], differentiable=True)
        p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match="leaf"):
            opt.step()
