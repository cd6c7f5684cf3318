"""A gated MLP on a CPU keeps what its last product multiplies, instead of making it again in passes over memory."""

import pytest
import torch
import torch.nn.functional as F

from ops_math.blocks.mlp_products import gated_mlp
from ops_math.layout import lay_together
from ops_math.ops.glu.op import OP as GLU
from ops_math.testing.capture import watch


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.gate, self.up, self.down = (torch.nn.Linear(*shape, bias=False) for shape in ((24, 40), (24, 40), (40, 24)))

    def forward(self, x):
        return gated_mlp(x, *((m.weight, None) for m in (self.gate, self.up, self.down)), "silu")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_makes_no_product_again_and_gives_the_gradients(packed, dtype):
    m = Mlp().to(dtype)
    if packed:
        lay_together([m.gate.weight, m.up.weight])
    x = torch.randn(4, 6, 24, dtype=dtype, requires_grad=True)
    dy = torch.randn(4, 6, 24, dtype=dtype)
    calls = [call for call in watch(lambda: m(x).backward(dy)).calls if call.operator == "glu"]
    problems = {call.phase: GLU.phases[call.phase].problem_of(*call.args) for call in calls}
    assert (problems["fwd"].keep, problems["bwd"].keep, problems["bwd"].need_y) == (False, False, False)
    assert problems["bwd"].packing == ("halves" if packed else "")
    found = [p.grad for p in m.parameters()]
    wide = [w.detach().double().requires_grad_() for w in (m.gate.weight, m.up.weight, m.down.weight)]
    y = (F.silu(x.detach().double() @ wide[0].t()) * (x.detach().double() @ wide[1].t())) @ wide[2].t()
    for grad, exact in zip(found, torch.autograd.grad(y, wide, dy.double()), strict=True):
        assert (grad.double() - exact).norm() < (1e-6 if dtype == torch.float32 else 0.02) * exact.norm()
