"""What subulp uses of torch without a promise of torch's: each test fails when torch changes it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from subulp import torch_internals


def test_the_sharded_tensor_class_is_where_we_look_for_it():
    from torch.distributed.tensor import DTensor

    assert torch_internals.dtensor_class() is DTensor
    assert not torch_internals.is_dtensor(torch.zeros(1))


def test_importing_subulp_loads_neither_dtensor_nor_the_compiler():
    """Each costs a second or more."""
    code = (
        "import sys, torch; before = set(sys.modules); import subulp; new = set(sys.modules) - before;"
        "print(*sorted(m for m in new if m.startswith(('torch.distributed.tensor', 'torch._dynamo', 'numba', 'triton'))))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == ""


def test_the_offset_of_a_block_takes_these_arguments():
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as function

    assert list(inspect.signature(function).parameters)[:3] == ["global_shape", "mesh", "placements"]


def test_an_opaque_function_is_not_traced():
    seen = []

    @torch_internals.opaque_to_compile
    def opaque(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: opaque(x) * 2, backend="eager")
    assert compiled(torch.ones(())).item() == 4
    assert seen == [False]
    assert opaque.__name__ == "opaque"


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_torch_wraps_an_opaque_step_with_its_hooks(hook):
    import subulp

    p = torch.nn.Parameter(torch.zeros(3))
    opt = subulp.AdamW([p])
    calls: list[int] = []
    getattr(opt, hook)(lambda *args: calls.append(1))
    p.grad = torch.ones(3)
    opt.step()
    assert calls == [1]
