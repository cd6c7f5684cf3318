"""One fused operator, held against PyTorch's own: same numbers, forward and backward."""

import torch
import torch.nn.functional as F

import ops_math as om

x = torch.randn(4, 256, 512, requires_grad=True)
weight = torch.ones(512, requires_grad=True)
dy = torch.randn(4, 256, 512)

y = om.rms_norm(x, weight, eps=1e-6)
dx, dw = torch.autograd.grad(y, (x, weight), dy)

reference = F.rms_norm(x, (512,), weight, 1e-6)
dx_reference, dw_reference = torch.autograd.grad(reference, (x, weight), dy)
torch.testing.assert_close(y, reference)
torch.testing.assert_close(dx, dx_reference)
torch.testing.assert_close(dw, dw_reference, rtol=1e-4, atol=1e-4)

print(om.stats())
