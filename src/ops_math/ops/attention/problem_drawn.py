"""The same problem as `attention`, with its dropout mask drawn by PyTorch's generator."""

from ops_math.ops.attention.problem import AttentionProblem, cost, storage

__all__ = ["AttentionProblem", "cost", "storage"]
