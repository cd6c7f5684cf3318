"""The two lines in a plain PyTorch model: the same module, the same weights, the same losses; only `forward` changes."""

import torch
from torch import nn

import ops_math as om


class Layer(nn.Module):
    """A pre-norm transformer layer out of PyTorch's own parts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-6)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """As one writes it today."""
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class FusedLayer(Layer):
    """The same layer, with the two lines."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Each line is x + part(norm(x)), read from the modules' weights."""
        x = om.residual_attention(x, self.norm1, self.attn, attn_mask=mask, is_causal=True)
        return om.residual_mlp(x, self.norm2, self.mlp)


def losses(kind: type[Layer], steps: int = 5) -> list[float]:
    """Train one layer to give back its input shifted by one place."""
    torch.manual_seed(0)
    layer, x = kind(128, 4), torch.randn(2, 64, 128)
    mask = nn.Transformer.generate_square_subsequent_mask(64)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    seen = []
    for _ in range(steps):
        loss = (layer(x, mask)[:, :-1] - x[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


plain, fused = losses(Layer), losses(FusedLayer)
print("plain ", " ".join(f"{loss:.6f}" for loss in plain))
print("fused ", " ".join(f"{loss:.6f}" for loss in fused))
torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=1e-5, atol=0.0)
with om.enabled(False):
    assert losses(FusedLayer) == plain, "switched off, the fused layer is the plain one, bit for bit"
print(om.stats())
