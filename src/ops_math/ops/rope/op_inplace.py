"""The rotation in place, private: for a packed tensor that its caller has just made and nobody else holds."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import checks, settings
from ops_math.dispatch import define_in_place, needs_grad, once_differentiable
from ops_math.ops.rope.op import OP, Heads, check_packed, problem, rope_qkv, turn_packed
from ops_math.ops.rope.problem import RopeProblem

Tensor = torch.Tensor


def _problem(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, rotary_dim: int, num_rotated: int, interleaved: bool, inverse: bool
) -> RopeProblem:
    return problem(x, None, cos, sin, position_ids, rotary_dim, num_rotated, interleaved, x.dtype)._replace(inverse=inverse)


# Writes into x [B, S, heads, D].
TURN = define_in_place(
    OP,
    "(Tensor(a!) x, Tensor cos, Tensor sin, Tensor? position_ids, int rotary_dim, int num_rotated, bool interleaved, bool inverse) -> ()",
    _problem,
)


def turn_packed_(qkv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, heads: Heads, inverse: bool = False) -> None:
    """Turn, or turn back, the queries and keys of a packed tensor where they are, below autograd.

    For a backward that made `qkv` itself: an incoming gradient is not its own.
    """
    num_rotated = heads.num_heads + heads.num_kv_heads
    TURN(heads.unpack(qkv), cos, sin, position_ids, heads.rotary_dim, num_rotated, heads.interleaved, inverse)


class _RopeQkvInPlace(torch.autograd.Function):
    """`rope_qkv` written into its input. The gradient is turned back in a buffer of its own: others may hold the incoming one."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, heads: Heads) -> Tensor:
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.options = heads, qkv.dtype
        ctx.mark_dirty(qkv)
        turn_packed_(qkv, cos, sin, position_ids, heads)
        return qkv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv: Tensor) -> tuple[Any, ...]:
        return turn_packed(OP.bwd, dqkv, *ctx.saved_tensors, *ctx.options), *(None,) * 4


def rope_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, *,
    num_heads: int, num_kv_heads: int, interleaved: bool = False, position_ids: Tensor | None = None, rotary_dim: int | None = None,
) -> Tensor:  # fmt: skip
    """`rope_qkv` that writes into `qkv` and returns it.

    Autograd is told that the tensor changed, and refuses the backward of whoever had saved it. Under torch.compile the functional
    form runs: the compiler knows best which buffers are free.
    """
    heads = check_packed("rope_qkv_", qkv, cos, sin, position_ids, num_heads, num_kv_heads, rotary_dim, interleaved)
    if any(step == 0 and size > 1 for size, step in zip(qkv.shape, qkv.stride(), strict=True)) or qkv.stride(-1) != 1:
        needs = "dense along its last dimension, each element in memory of its own"
        checks.fail("rope_qkv_", "qkv", needs, f"strides {qkv.stride()}", "Use rope_qkv.")
    if not settings.active() or torch.compiler.is_compiling():
        return rope_qkv(qkv, cos, sin, position_ids=position_ids, **heads._asdict())
    if needs_grad(qkv):
        return _RopeQkvInPlace.apply(qkv, cos, sin, position_ids, heads)
    turn_packed_(qkv, cos, sin, position_ids, heads)
    return qkv
