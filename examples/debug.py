"""om.debug watches a training step: quiet while all is well, and pointing at the very call when a gradient is 1 % wrong."""

import torch
from torch import nn

import ops_math as om
from ops_math import catalog
from ops_math.testing import FAULTS, planted


class Layer(nn.Module):
    """A norm and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + mlp(norm(x)), its own norm first called by hand."""
        h = om.rms_norm(x, self.norm.weight, eps=1e-6)
        return om.residual_mlp(x + h, self.norm, self.mlp)


torch.manual_seed(0)
model = nn.Sequential(Layer(64), Layer(64))
x = torch.randn(8, 32, 64)

with om.debug(on_error="record") as debugger:
    model(x).square().mean().backward()
healthy = debugger.report()
print(healthy, "\n")
assert healthy.rows
assert not healthy.outside

# A fault as one might slip into a kernel: the gradient of the norm's input, 1 % too large.
fault = next(f for f in FAULTS if f.name == "gradient 0 scaled by 1.01")
with planted(catalog.operators()["rms_norm"], "eager", fault), om.debug(on_error="record") as debugger:
    model(x).square().mean().backward()
broken = debugger.report()
print("\n".join(str(row) for row in broken.outside))
assert any(row.site.call == "rms_norm" for row in broken.outside)
