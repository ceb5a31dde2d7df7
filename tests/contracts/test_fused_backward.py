"""Updates inside the backward pass: the bits of a step after it, no gradients left, nothing kept alive."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import subulp
from tests.bits import same_bits
from tests.models import generator
from tests.specs import SPECS

all_optimizers = pytest.mark.parametrize("spec", SPECS, ids=str)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 17)
        self.second = nn.Linear(17, 17)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(17), requires_grad=False)
        with torch.no_grad():
            g = generator(1)
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.second(torch.tanh(self.first(x))) * self.frozen)).float().square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 9, generator=generator(100 + step)).bfloat16()


def check_equal(net: Net, other: Net) -> None:
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach()), name


@all_optimizers
@pytest.mark.parametrize("micro", [1, 3])
def test_bits_are_those_of_a_step_after_backward(spec, micro):
    """The second layer is used twice, so its gradient accumulates within a pass, too."""
    net, reference = Net(), Net()
    opt, other = spec.make(net.named_parameters()), spec.make(reference.named_parameters())
    with subulp.FusedBackward(opt) as fused:
        for step in range(3):
            for part in range(micro):
                x = batch(10 * step + part)
                if part < micro - 1:
                    with fused.accumulating():
                        net(x).backward()
                    assert net.first.weight.grad is not None
                else:
                    net(x).backward()
                reference(x).backward()
            opt.step()  # finds no gradients
            other.step()
            other.zero_grad()
            assert all(p.grad is None for p in net.parameters())
    check_equal(net, reference)
    assert net.unused.weight not in opt.state or not opt.state[net.unused.weight]
    assert float(opt.state[net.first.weight]["step"]) == 3


def test_clipping_each_tensor_is_torchs_clipping_of_each_tensor():
    net, reference = Net(), Net()
    opt, other = subulp.AdamW(net.named_parameters()), subulp.AdamW(reference.named_parameters())
    fused = subulp.FusedBackward(opt, max_grad_norm=1e-3)
    for step in range(3):
        net(batch(step)).backward()
        reference(batch(step)).backward()
        for p in reference.parameters():
            if p.grad is not None:
                torch.nn.utils.clip_grad_norm_([p], 1e-3)
        other.step()
        other.zero_grad()
    check_equal(net, reference)
    fused.remove()


def test_clipping_by_recent_norms_is_global_clipping_once_all_norms_are_known():
    """The same batch with a rate of zero: from the second pass on every recent norm is the present one."""
    net, reference = Net(), Net()
    opt = subulp.SGD(net.named_parameters(), lr=0.0)
    fused = subulp.FusedBackward(opt, max_grad_norm=1e-2, clip="recent")
    net(batch(0)).backward()
    opt.param_groups[0]["lr"] = 1.0
    net(batch(0)).backward()
    other = subulp.SGD(reference.named_parameters(), lr=0.0)
    reference(batch(0)).backward()
    other.step()  # counts, so that the noise is that of a second step
    other.param_groups[0]["lr"] = 1.0
    total = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)
    assert total > 1e-2
    other.step()
    fused.remove()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        # Both norms are sums of the same bf16 numbers in fp32 or fp64, so the clipped bf16 gradients may differ by an ulp
        # (2**-8 relative) where the scaled value is near a middle, and the rounded weights by an ulp.
        assert (p - q).abs().max() <= 2.0**-8 * q.abs().max() + 2.0**-8 * 1e-2


def test_hooks_follow_new_groups_of_a_loaded_checkpoint_and_of_schedulers():
    net = Net()
    opt = subulp.SGD(net.named_parameters(), lr=1.0)
    fused = subulp.FusedBackward(opt)
    opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in net.parameters()]
    net(batch(0)).backward()
    assert all(same_bits(p.detach(), q) for p, q in zip(net.parameters(), before, strict=True))
    fused.remove()


def test_each_parameter_is_updated_by_its_own_group():
    net, reference = Net(), Net()
    opts = [
        subulp.AdamW(
            [
                {"params": list(n.first.named_parameters("first")), "lr": 0.3},
                {"params": list(n.second.named_parameters("second")), "lr": 0.01, "weight_decay": 0.5},
            ]
        )
        for n in (net, reference)
    ]
    fused = subulp.FusedBackward(opts[0])
    for step in range(2):
        net(batch(step)).backward()
        reference(batch(step)).backward()
        opts[1].step()
        opts[1].zero_grad()
    check_equal(net, reference)
    fused.remove()


def test_parameters_may_be_repointed_between_passes():
    """Layer offload: the weights live elsewhere between passes."""
    net, reference = Net(), Net()
    opt, other = subulp.AdamW(net.named_parameters()), subulp.AdamW(reference.named_parameters())
    fused = subulp.FusedBackward(opt)
    for step in range(3):
        for p in net.parameters():
            p.data = p.data.clone()
        net(batch(step)).backward()
        reference(batch(step)).backward()
        other.step()
        other.zero_grad()
    check_equal(net, reference)
    fused.remove()


def test_backward_on_other_threads():
    nets = [Net() for _ in range(4)]
    opts = [subulp.AdamW(net.parameters(), stream=0) for net in nets]
    for opt in opts:
        subulp.FusedBackward(opt)

    def train(net: Net) -> None:
        for step in range(3):
            net(batch(step)).backward()

    threads = [threading.Thread(target=train, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for net in nets[1:]:
        check_equal(net, nets[0])


def test_it_works_for_as_long_as_the_optimizer_lives_without_being_kept():
    net = Net()
    opt = subulp.AdamW(net.parameters())
    subulp.FusedBackward(opt)
    gc.collect()
    net(batch(0)).backward()
    assert float(opt.state[net.first.weight]["step"]) == 1


def test_after_removal_gradients_stay():
    net = Net()
    opt = subulp.AdamW(net.parameters())
    before = net.first.weight.detach().clone()
    fused = subulp.FusedBackward(opt)  # kept: the hooks of one that is gone do nothing anyway
    fused.remove()
    net(batch(0)).backward()
    assert net.first.weight.grad is not None
    assert same_bits(net.first.weight.detach(), before)


def test_nothing_is_kept_alive():
    net = Net()
    opt = subulp.AdamW(net.parameters())
    fused = subulp.FusedBackward(opt)
    net(batch(0)).backward()
    weight, optimizer, hooks = weakref.ref(net.first.weight), weakref.ref(opt), weakref.ref(fused)
    del net, opt, fused
    gc.collect()
    assert (weight(), optimizer(), hooks()) == (None, None, None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm=0"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm='1'"),
        ({"clip": "global"}, ValueError, "'tensor', 'recent'"),
    ],
)
def test_misuse_is_told(options, error, message):
    net = Net()
    with pytest.raises(error, match=message):
        subulp.FusedBackward(subulp.AdamW(net.parameters()), **options)
    with pytest.raises(TypeError, match=r"torch\.optim\.adamw\.AdamW"):
        subulp.FusedBackward(torch.optim.AdamW(net.parameters()))
