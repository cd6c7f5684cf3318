"""What cuDNN's attention returns as its random state, and whether its backward takes it back: shapes, dtypes, devices."""

from __future__ import annotations

import torch


def main() -> None:
    """Print the facts and the agreement of the backward with autograd through the recovered mask."""
    q, k, v = (torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    eye = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(2, 4, 64, 64).contiguous()
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    torch.manual_seed(0)
    result = forward(q, k, v, None, True, 0.25, False, False, scale=0.125)
    for i, r in enumerate(result):
        if isinstance(r, torch.Tensor):
            print(i, tuple(r.shape), r.dtype, r.device, r.flatten()[:2].tolist() if r.numel() < 3 else "")
        else:
            print(i, r)
    torch.manual_seed(0)
    probabilities = forward(q, k, eye, None, True, 0.25, False, False, scale=0.125)[0]
    keep = (probabilities != 0).double()
    print("kept", keep.mean().item())
    dout = torch.randn_like(v)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, result[0], result[1], result[6], result[7], None, None, None, 64, 64, 0.25, False, scale=0.125
    )
    q64, k64, v64 = (t.double().requires_grad_() for t in (q, k, v))
    out = ((q64 @ k64.transpose(-1, -2) * 0.125).softmax(-1) * keep / 0.75) @ v64
    print("forward error", ((result[0].double() - out).norm() / out.norm()).item())
    for g, r in zip(grads, torch.autograd.grad(out, (q64, k64, v64), dout.double()), strict=True):
        print("gradient error", ((g.double() - r).norm() / r.norm()).item())


if __name__ == "__main__":
    main()
