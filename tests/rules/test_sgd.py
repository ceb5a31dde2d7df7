"""SGD: what its optional buffer means for a checkpoint."""

from __future__ import annotations

import torch

import subulp
from tests.bits import same_bits
from tests.models import make_params, train


def test_momentum_can_be_turned_on_after_a_checkpoint_of_torch_without_it():
    """torch 2.6 saves ``momentum_buffer: None`` then, later versions nothing."""
    params, reference, fresh = (make_params(((3, 5), (7,)), torch.float32) for _ in range(3))
    other = torch.optim.SGD(reference, lr=0.1)
    train(other, reference, 2)
    opt = subulp.SGD(params, lr=0.1, backend="eager", stream=0)
    saved = other.state_dict()
    saved["state"] = {i: {"momentum_buffer": None} for i in range(len(params))}
    opt.load_state_dict(saved)
    assert all(value is not None for entry in opt.state.values() for value in entry.values())
    begun = subulp.SGD(fresh, lr=0.1, momentum=0.9, backend="eager", stream=0)
    opt.param_groups[0]["momentum"] = 0.9
    for o, own in ((opt, params), (begun, fresh)):
        train(o, own, 3, start=2)
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(params, fresh, strict=True))
