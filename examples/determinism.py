"""Level 2: a batch has the same bits whole and in pieces, gradients of parameters too; and a dropout mask that a recomputation keeps."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ops_math as om
from ops_nn import SeedPool

torch.manual_seed(0)
norm, mlp = nn.RMSNorm(96), nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 96))
x = torch.randn(64, 96)


def run(rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output, and the gradients that it leaves."""
    y = om.residual_mlp(rows, norm, mlp)
    y.square().sum().backward()
    return y.detach(), [p.grad for p in (*norm.parameters(), *mlp.parameters())]


def whole_and_pieces(level: int) -> tuple[bool, bool]:
    """Whether outputs and gradients of the whole batch have the bits of four pieces."""
    with om.determinism(level, token_block=16):
        for p in (*norm.parameters(), *mlp.parameters()):
            p.grad = None
        y, grads = run(x)
        want = [g.clone() for g in grads]
        for p in (*norm.parameters(), *mlp.parameters()):
            p.grad = None
        pieces = [run(piece) for piece in x.split(16)]
    same = torch.equal(y, torch.cat([piece for piece, _ in pieces]))
    return same, all(torch.equal(a, b) for a, b in zip(want, pieces[-1][1], strict=True))


for level in (1, 2):
    outputs, gradients = whole_and_pieces(level)
    words = ["the same" if same else "other" for same in (outputs, gradients)]
    print(f"level {level}: outputs have {words[0]} bits in pieces, gradients of parameters {words[1]} bits")
assert (outputs, gradients) == (True, True)

masks: list[torch.Tensor] = []
pool = SeedPool(seed=0)
layer = nn.Dropout(0.5)


def dropped(rows: torch.Tensor) -> torch.Tensor:
    """A layer that is recomputed in the backward."""
    y = layer(rows)
    masks.append(y == 0)
    return y.square()


for keyed in (False, True):
    if keyed:
        pool.attach(layer)
        pool.step(0)
    masks.clear()
    checkpoint(dropped, x.clone().requires_grad_(), use_reentrant=False, preserve_rng_state=False).sum().backward()
    share = (masks[0] != masks[1]).double().mean().item()
    print(f"{'with' if keyed else 'without'} a pool of seeds {share:.0%} of the mask differs in the recomputation")
assert share == 0.0
