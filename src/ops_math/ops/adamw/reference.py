"""The definition of AdamW on one parameter, in plain torch.

p parameter, g gradient, m and v the running means of g and of its square, t the number of this step, from 1.
"""

from __future__ import annotations

import torch


def adamw(
    p: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    t: float,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parameter and its two means after step `t`; all of one shape."""
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    return p - lr * weight_decay * p - lr * m_hat / (v_hat.sqrt() + eps), m, v
