"""Muon on parameters of more than two dimensions, and the groups that it makes by itself."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import subulp
from subulp.rules import muon
from tests.bits import same_bits
from tests.models import everything, make_params, train

CONVOLUTION, EXPERTS = (6, 3, 2, 2), (4, 5, 7)


def test_a_flattened_convolution_has_the_bits_of_its_matrix():
    for dtype in (torch.bfloat16, torch.float32):
        weight, matrix = make_params((CONVOLUTION,), dtype), make_params(((6, 12),), dtype)
        opts = [subulp.Muon(weight, lr=0.02, view="flatten"), subulp.Muon(matrix, lr=0.02)]
        for opt, params in zip(opts, (weight, matrix), strict=True):
            train(opt, params, 3)
        assert weight[0].shape == CONVOLUTION
        assert all(
            same_bits(a.reshape(b.shape), b)
            for a, b in zip(everything(opts[0], weight), everything(opts[1], matrix), strict=True)
        )


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_a_flattened_convolution_moves_as_torchs_matrix(adjust_lr_fn):
    """The factor of the rate goes by the matrix (24, 4), not by the kernel's last dimensions."""
    (weight,), (matrix,) = make_params(((24, 1, 2, 2),), torch.float32), make_params(((24, 4),), torch.float32)
    train(subulp.Muon([weight], lr=0.02, adjust_lr_fn=adjust_lr_fn, view="flatten"), [weight], 1)
    train(torch.optim.Muon([matrix], lr=0.02, adjust_lr_fn=adjust_lr_fn), [matrix], 1)
    # An entry of O is at most 1.3, the factor at most sqrt(6), and bf16 numbers may round the other way: see test_muon.
    assert (weight.detach().view(24, 4) - matrix.detach()).abs().max() < 0.02 * 2.5 * 1.3 * 4 * 2.0**-8


def test_a_channels_last_weight_moves_as_a_contiguous_one():
    params, plain = make_params((CONVOLUTION,), torch.float32), make_params((CONVOLUTION,), torch.float32)
    params[0].data = params[0].data.to(memory_format=torch.channels_last)
    for p in (params, plain):
        train(subulp.Muon(p, lr=0.02, view="auto"), p, 3)
    assert torch.equal(params[0].detach(), plain[0].detach())


@pytest.mark.parametrize("limit", [1 << 24, 70, 1])
def test_a_stack_moves_as_its_matrices(limit, monkeypatch):
    monkeypatch.setattr(muon, "BATCH", limit)
    (stack,) = make_params((EXPERTS,), torch.float32)
    matrices = [Parameter(matrix.clone()) for matrix in stack.detach()]
    together, alone = subulp.Muon([stack], lr=0.02, view="stack"), subulp.Muon(matrices, lr=0.02)
    for step in range(3):
        grad = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(step))
        stack.grad = grad
        for p, g in zip(matrices, grad, strict=True):
            p.grad = g.clone()
        together.step()
        alone.step()
    assert same_bits(stack.detach(), torch.stack([p.detach() for p in matrices]))
    assert together.state[stack]["momentum_buffer"].shape == EXPERTS


def test_views_are_refused_with_the_cure_and_may_differ_between_groups():
    for shape in (CONVOLUTION, EXPERTS):
        with pytest.raises(ValueError, match=r"use_muon=False.*view='flatten'.*view='stack'"):
            subulp.Muon(make_params((shape,)))
    with pytest.raises(ValueError, match=r"shape \(7,\)"):
        subulp.Muon(make_params(((7,),)), view="auto")
    with pytest.raises(ValueError, match="view='cube'"):
        subulp.Muon(make_params((CONVOLUTION,)), view="cube")
    params, other = make_params((EXPERTS, CONVOLUTION)), make_params((EXPERTS, CONVOLUTION))
    groups = [{"params": params[0], "view": "stack"}, {"params": params[1], "view": "flatten"}]
    opts = [subulp.Muon(groups, lr=0.02), subulp.Muon(other, lr=0.02, view="auto")]
    for opt, some in zip(opts, (params, other), strict=True):
        train(opt, some, 2)
    assert all(map(same_bits, everything(opts[0], params), everything(opts[1], other)))


def test_a_weight_that_thaws_is_checked_before_anything_changes():
    params = make_params(((3, 4), (5,)))
    params[1].requires_grad_(False)
    opt = subulp.Muon(params, lr=0.02)
    before = params[0].detach().clone()
    params[1].requires_grad_(True)
    with pytest.raises(ValueError, match=r"shape \(5,\) .*group 0"):
        train(opt, params, 1)
    assert same_bits(params[0].detach(), before)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 4)
        self.conv = nn.Conv2d(3, 4, 2)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm((2, 4))
        self.lm_head = nn.Linear(4, 10)
        self.scale = Parameter(torch.ones(()))


def names_of(opt: subulp.Muon) -> dict[bool, list[str]]:
    return {group["use_muon"]: group["param_names"] for group in opt.param_groups}


def test_groups_are_made_by_name_and_shape():
    names = names_of(subulp.Muon(Net().named_parameters(), lr=0.02, grouping="auto"))
    assert names[True] == ["blocks.0.weight", "blocks.1.weight"]
    assert len(names[False]) == len(list(Net().parameters())) - 2
    names = names_of(subulp.Muon(Net().named_parameters(), lr=0.02, grouping=True, view="auto"))
    assert names[True] == ["conv.weight", "blocks.0.weight", "blocks.1.weight"]
    wrapped = [(f"_orig_mod.module.{name}", p) for name, p in Net().named_parameters()]
    names = names_of(subulp.Muon(wrapped, lr=0.02, grouping="auto"))
    assert names[True] == ["_orig_mod.module.blocks.0.weight", "_orig_mod.module.blocks.1.weight"]


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("transformer.h.0.mlp.c_fc.weight", True),
        ("bert.encoder.layer.0.attention.output.dense.weight", True),
        ("text_embedder.layers.0.mlp.fc1.weight", True),
        ("transformer_blocks.0.norm1.linear.weight", True),
        ("transformer.wte.weight", False),
        ("model.embed_tokens.weight", False),
        ("pos_embedding", False),
        ("x_embedder.proj.weight", False),
        ("output.weight", False),
        ("proj_out.weight", False),
        ("encoder.norm.weight", False),
        ("transformer.ln_f.weight", False),
        ("attention.in_proj_bias", False),
        ("classifier.dense.weight", False),
    ],
)
def test_names(name, hidden):
    opt = subulp.Muon([(name, make_params(((3, 4),))[0]), ("x", make_params(((3, 4),))[0])], grouping="auto")
    assert (name in names_of(opt)[True]) is hidden


def test_without_names_shapes_decide():
    """As sd-scripts and Lightning pass them: a list, an iterator, groups of a dict's values; no names."""
    with torch.device("meta"):
        shapes = [(30522, 768), (21504, 3072), (768, 30522), (40960, 16), (7,), (4, 3, 2, 2)]
        params = [Parameter(torch.empty(shape, dtype=torch.bfloat16)) for shape in shapes]
    for given in (params, iter(params), [{"params": dict(enumerate(params)).values()}]):
        opt = subulp.Muon(given, lr=0.02, grouping="auto")
        found = {g["use_muon"]: [tuple(p.shape) for p in g["params"]] for g in opt.param_groups}
        assert found == {True: shapes[1:4], False: [shapes[0], *shapes[4:]]}


def test_each_given_group_is_split_and_adam_has_settings_of_its_own():
    net = Net()
    groups = [
        {"params": list(net.blocks.parameters()), "lr": 0.01, "initial_lr": 0.01, "name": "unet"},
        {"params": [net.norm.weight], "lr": 0.03, "use_muon": False, "betas": (0.5, 0.6)},
        {"params": [net.scale], "lr": 0.05},
    ]
    adam = {"lr": 1e-4, "weight_decay": 0.0, "eps": 1e-10, "betas": (0.8, 0.9)}
    opt = subulp.Muon(groups, lr=0.02, grouping="auto", adam=adam)
    rows = [(g["use_muon"], len(g["params"]), g["lr"], g.get("initial_lr")) for g in opt.param_groups]
    assert rows == [(True, 2, 0.01, 0.01), (False, 2, 1e-4, 1e-4), (False, 1, 0.03, None), (False, 1, 1e-4, None)]
    assert [g["betas"] for g in opt.param_groups[1:]] == [(0.8, 0.9), (0.5, 0.6), (0.8, 0.9)]
    assert [(g["eps"], g["weight_decay"]) for g in opt.param_groups[1:]] == [(1e-10, 0.0)] * 3
    assert (opt.param_groups[0]["eps"], opt.param_groups[0]["weight_decay"]) == (1e-7, 0.1)
    assert opt.param_groups[1]["name"] == "unet"


def test_made_groups_train_save_copy_and_grow():
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    opt = subulp.Muon(net.named_parameters(), lr=0.02, grouping="auto", adam={"lr": 1e-3})
    train(opt, list(net.parameters()), 2)
    again = subulp.Muon(other.named_parameters(), lr=0.02, grouping="auto", adam={"lr": 1e-3})
    again.load_state_dict(opt.state_dict())
    assert set(opt.state[next(net.blocks.parameters())]) == {"step", "momentum_buffer", "stream"}
    other.load_state_dict(net.state_dict())
    for o, n in ((opt, net), (again, other)):
        train(o, list(n.parameters()), 2, start=2)
    assert all(map(same_bits, everything(opt, list(net.parameters())), everything(again, list(other.parameters()))))
    opt.add_param_group({"params": [(f"more.{name}", p) for name, p in nn.Linear(3, 3).named_parameters()]})
    assert [group["use_muon"] for group in opt.param_groups[2:]] == [True, False]
    with pytest.raises(ValueError, match="betas"):
        opt.add_param_group({"params": [("a.weight", make_params(((3, 3),))[0])], "betas": (2, 2)})
    assert len(opt.param_groups) == 4
    for copied in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        copied.step()


def test_what_grouping_cannot_do_is_told():
    with pytest.raises(ValueError, match="grouping='shape'"):
        subulp.Muon(make_params(((3, 4),)), grouping="shape")
    with pytest.raises(TypeError, match="adam='x' is a str"):
        subulp.Muon(make_params(((3, 4),)), adam="x")
    with pytest.raises(TypeError, match=r"'momentum'"):
        subulp.Muon(make_params(((3, 4),)), adam={"momentum": 0.9})
    with pytest.warns(UserWarning, match="found no matrix"):
        subulp.Muon(make_params(((12,),)), grouping="auto")
    with pytest.raises(TypeError, match="set"):
        subulp.Muon([{"params": set(make_params(((3, 4),)))}], grouping="auto")
