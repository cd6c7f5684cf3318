"""Control of a training run: adopt fused operators in a model, compare runs, and take them back out."""

from ops_nn.seeds import SeedPool

__all__ = ["SeedPool"]
