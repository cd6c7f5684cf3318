"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ops_math import checks, settings
from ops_math.dispatch import absent, apply, define, define_in_place, needs_grad, store_dtype
from ops_math.ops.rope import plain
from ops_math.ops.rope.problem import RopeProblem
from ops_math.spec import dtype_name as name_of


def _problem(
    x: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, rotary_dim: int, num_rotated: int, interleaved: bool, out: torch.dtype
) -> RopeProblem:
    batch, seq, heads, width = x.shape
    kv_heads = 0 if k is None else k.shape[2]
    table_batch = cos.shape[0] if cos.dim() == 3 else 1
    positions = "" if position_ids is None else name_of(position_ids.dtype)
    return RopeProblem(batch, seq, heads, kv_heads, width, rotary_dim, num_rotated, name_of(x.dtype), name_of(out), name_of(cos.dtype), table_batch, positions, interleaved)


def _fake(
    x: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, rotary_dim: int, num_rotated: int, interleaved: bool, out: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=out), absent(x) if k is None else k.new_empty(k.shape, dtype=out)


_SCHEMA = "(Tensor x, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, int rotary_dim, int num_rotated, bool interleaved, ScalarType out) -> (Tensor, Tensor)"

OP = define(
    "rope",
    __package__,
    fwd=_SCHEMA,
    bwd=_SCHEMA,
    fake_fwd=_fake,
    fake_bwd=_fake,
    problem_fwd=_problem,
    problem_bwd=_problem,
    implementations=("triton_gpu", "eager"),
)


def _problem_in_place(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None,
    rotary_dim: int, num_rotated: int, interleaved: bool, inverse: bool,
) -> RopeProblem:  # fmt: skip
    p = _problem(x, None, cos, sin, position_ids, rotary_dim, num_rotated, interleaved, x.dtype)
    return p._replace(inverse=inverse)


# Writes into x [B, S, heads, D]. Private: for a tensor that its caller made and nobody else holds.
TURN_IN_PLACE = define_in_place(
    OP,
    "(Tensor(a!) x, Tensor cos, Tensor sin, Tensor? position_ids, int rotary_dim, int num_rotated, bool interleaved, bool inverse) -> ()",
    _problem_in_place,
)


def _with_batch(x: torch.Tensor, dims: int) -> torch.Tensor:
    """[T, H, D] as [1, T, H, D]."""
    return x if x.dim() == dims else x.unsqueeze(0)


class _Rope(torch.autograd.Function):
    """q and k turned; saves the tables and nothing of q and k."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, rotary_dim: int, interleaved: bool, out: torch.dtype) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.set_materialize_grads(False)
        ctx.options = rotary_dim, interleaved, q.dtype
        turned = _apply(q, k, cos, sin, position_ids, rotary_dim, interleaved, out)
        ctx.mark_non_differentiable(*(t for t, needed in zip(turned, ctx.needs_input_grad[:2], strict=True) if not needed))
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor | None, dk: torch.Tensor | None) -> tuple[Any, ...]:
        rotary_dim, interleaved, dtype = ctx.options
        if dq is None and dk is None:
            return (None,) * 8
        first, second = (dk, None) if dq is None else (dq, dk)
        x = _with_batch(first, 4)
        turned, other = OP.bwd(x, None if second is None else _with_batch(second, 4), *ctx.saved_tensors, rotary_dim, x.shape[2], interleaved, dtype)
        turned = turned.view(first.shape)
        grads = (None, turned) if dq is None else (turned, None if second is None else other.view(second.shape))
        return *grads, *(None,) * 6


class _RopeQkv(torch.autograd.Function):
    """The heads of q and k in a packed tensor turned; saves the tables and nothing of the tensor."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, num_heads: int, num_kv_heads: int, rotary_dim: int, interleaved: bool, out: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.options = num_heads, num_kv_heads, rotary_dim, interleaved, qkv.dtype
        return _apply_packed(OP.fwd, qkv, cos, sin, position_ids, num_heads, num_kv_heads, rotary_dim, interleaved, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv: torch.Tensor) -> tuple[Any, ...]:
        return _apply_packed(OP.bwd, dqkv, *ctx.saved_tensors, *ctx.options), *(None,) * 8


def _apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, rotary_dim: int, interleaved: bool, out: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = _with_batch(q, 4)
    turned = OP.fwd(x, _with_batch(k, 4), cos, sin, position_ids, rotary_dim, x.shape[2], interleaved, out)
    return turned if q.dim() == 4 else tuple(t.squeeze(0) for t in turned)


def _apply_packed(op: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, num_heads: int, num_kv_heads: int, rotary_dim: int, interleaved: bool, out: torch.dtype) -> torch.Tensor:
    heads = num_heads + 2 * num_kv_heads
    x = _with_batch(qkv.unflatten(-1, (heads, qkv.shape[-1] // heads)), 4)
    return op(x, None, cos, sin, position_ids, rotary_dim, num_heads + num_kv_heads, interleaved, out)[0].view(qkv.shape)


def _check_tables(operator: str, x: torch.Tensor, batch: int, seq: int, width: int, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, rotary_dim: int | None) -> int:
    """Check tables and positions against the tokens; returns the rotary width R."""
    for name, table in (("cos", cos), ("sin", sin)):
        checks.floating(operator, name, table)
        checks.no_gradient(operator, name, table)
    if cos.dim() not in (2, 3):
        checks.fail(operator, "cos", "[rows, R/2], [rows, R] or [batch, seq, R]", f"shape {checks.shape_text(cos.shape)}", "Drop or add dimensions.")
    checks.same_shape(operator, "cos", cos, "sin", sin)
    checks.same_dtype(operator, "cos", cos, "sin", sin)
    checks.same_device(operator, "q", x, cos=cos, sin=sin, position_ids=position_ids)
    if position_ids is not None:
        _check_positions(operator, batch, seq, cos, position_ids)
    elif cos.dim() == 3 and (cos.shape[0] not in (1, batch) or cos.shape[1] != seq):
        checks.fail(operator, "cos", f"[{batch}, {seq}, R] or [1, {seq}, R], a row for each token", f"shape {checks.shape_text(cos.shape)}", "Gather the rows of the tokens first.")
    elif cos.dim() == 2 and cos.shape[0] < seq:
        checks.fail(operator, "cos", f"a table of at least {seq} rows, one for each token", f"shape {checks.shape_text(cos.shape)}", "Make longer tables, or pass position_ids.")
    return _rotary_dim(operator, width, cos, rotary_dim)


def _check_positions(operator: str, batch: int, seq: int, cos: torch.Tensor, position_ids: torch.Tensor) -> None:
    checks.integer(operator, "position_ids", position_ids)
    if cos.dim() == 3:
        checks.fail(operator, "position_ids", "None with tables of three dimensions, which have a row for each token", "both", "Pass tables [rows, R/2] or drop position_ids.")
    if tuple(position_ids.shape) not in ((seq,), (1, seq), (batch, seq)):
        checks.fail(operator, "position_ids", f"[{seq}] or [{batch}, {seq}], one for each token", f"shape {checks.shape_text(position_ids.shape)}", "Check that it comes from the same batch.")
    if settings.STATE.checked and position_ids.numel():
        low, high = (int(v) for v in position_ids.aminmax())
        checks.positions(operator, low, high, cos.shape[0])


def _rotary_dim(operator: str, width: int, cos: torch.Tensor, rotary_dim: int | None) -> int:
    """R from the tables' width W. Three dimensions: W. Two: W where it passes half of the head's width D, D where W = D/2."""
    table = cos.shape[-1]
    if rotary_dim is None:
        if cos.dim() == 2 and 2 * table < width:
            needs = f"given, since a table of width {table} may be R = {table} with duplicated halves or R/2 of R = {2 * table}"
            checks.fail(operator, "rotary_dim", needs, "None", f"Pass rotary_dim={table} or rotary_dim={2 * table}.")
        rotary_dim = width if cos.dim() == 2 and 2 * table == width else table
    if not 0 < rotary_dim <= width or rotary_dim % 2:
        checks.fail(operator, "rotary_dim", f"even, above 0 and at most the head's width {width}", str(rotary_dim), "Check the tables' last dimension.")
    if table not in (rotary_dim, rotary_dim // 2):
        checks.fail(operator, "cos", f"of last dimension {rotary_dim // 2} or {rotary_dim} (rotary_dim {rotary_dim})", f"shape {checks.shape_text(cos.shape)}", "Check rotary_dim.")
    return rotary_dim


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, position_ids: torch.Tensor | None = None, rotary_dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys.

    (a, b) -> (a cos - b sin, b cos + a sin) for each pair of columns i < R/2 of each head: a = x[i], b = x[i + R/2], or, interleaved,
    a = x[2i], b = x[2i + 1]. Columns from R on are copied.

    Args:
        q: [B, S, H, D] or [T, H, D], fp32, bf16, fp16 or fp64, any strides.
        k: [B, S, K, D] or [T, K, D], of the dtype of `q`.
        cos, sin: [rows, R/2], or [rows, R] or [B, S, R] (also [1, S, R]) with the second half a copy of the first, as Hugging Face
            makes them: only columns below R/2 are read, in either convention. Tables that repeat each angle twice in a row are passed
            as `cos[..., ::2]`. fp32 or the dtype of `q`; they get no gradient.
        interleaved: whether pairs are neighbours instead of half a rotary width apart.
        position_ids: [S] or [B, S] integers, the row of each token; without them token s takes row s.
        rotary_dim: R. By default the tables' width W if they have three dimensions or W > D/2, and D if W = D/2; a narrower table
            of two dimensions needs it.

    Returns:
        (q, k), contiguous, of the shapes of `q` and `k` and of the dtype of `q` (under autocast: autocast's dtype).

    Precision: arithmetic in fp32 (fp64 for fp64), tables as they are; one rounding, at the store. The backward is the same with the
        sines negated; nothing of q and k is kept for it.
    Determinism: level 1; a token's result depends on nothing but the token.
    Raises: ArgumentError for shapes, dtypes or devices that do not fit, tables that require grad, and, where values are looked at
        (on the CPU, or under `checked`), positions outside the tables. On a GPU an outside position gives NaN.
    Source: Su et al., RoFormer, 2021; the gradient is the transposed rotation.
    """
    _check_heads("rope", q, k)
    batch, seq = (1, q.shape[0]) if q.dim() == 3 else q.shape[:2]
    width = _check_tables("rope", q, batch, seq, q.shape[-1], cos, sin, position_ids, rotary_dim)
    if not settings.active():
        return plain.rope(q, k, cos, sin, interleaved=interleaved, position_ids=position_ids, rotary_dim=width)
    out = store_dtype(q)
    if needs_grad(q, k):
        return apply(_Rope, q, k, cos, sin, position_ids, width, interleaved, out)
    return _apply(q, k, cos, sin, position_ids, width, interleaved, out)  # type: ignore[return-value]


def _check_heads(operator: str, q: torch.Tensor, k: torch.Tensor) -> None:
    checks.floating(operator, "q", q)
    checks.floating(operator, "k", k)
    if q.dim() not in (3, 4):
        checks.fail(operator, "q", "[B, S, H, D] or [T, H, D]", f"shape {checks.shape_text(q.shape)}", "Keep heads and their width apart.")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        needs = f"[{', '.join(str(n) for n in q.shape[:-2])}, heads, {q.shape[-1]}], with the tokens and width of q"
        checks.fail(operator, "k", needs, f"shape {checks.shape_text(k.shape)}", "Check that both come from the same layer.")
    checks.same_dtype(operator, "q", q, "k", k)
    checks.same_device(operator, "q", q, k=k)


def rope_qkv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
    position_ids: torch.Tensor | None = None,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """Rotary position embedding of the queries and keys in a packed tensor; the values are copied.

    Args:
        qkv: [B, S, (H + 2K) D] or [T, (H + 2K) D]: the heads of q, then of k, then of v, as one matrix product makes them.
        cos, sin: as in `rope`.
        num_heads: H.
        num_kv_heads: K.
        interleaved, position_ids, rotary_dim: as in `rope`.

    Returns:
        Of the shape of `qkv`, contiguous, in its dtype (under autocast: autocast's dtype).

    Precision: as `rope`.
    Determinism: level 1.
    Raises: ArgumentError as `rope`, and for a last dimension that H + 2K does not divide.
    Source: as `rope`.
    """
    width = _check_packed("rope_qkv", qkv, cos, sin, num_heads, num_kv_heads, position_ids, rotary_dim)
    if not settings.active():
        return plain.rope_qkv(qkv, cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads, interleaved=interleaved, position_ids=position_ids, rotary_dim=width)
    out = store_dtype(qkv)
    if needs_grad(qkv):
        return apply(_RopeQkv, qkv, cos, sin, position_ids, num_heads, num_kv_heads, width, interleaved, out)
    return _apply_packed(OP.fwd, qkv, cos, sin, position_ids, num_heads, num_kv_heads, width, interleaved, out)


def _check_packed(operator: str, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int, num_kv_heads: int, position_ids: torch.Tensor | None, rotary_dim: int | None) -> int:
    """Check a packed call; returns the rotary width."""
    checks.floating(operator, "qkv", qkv)
    if qkv.dim() not in (2, 3):
        checks.fail(operator, "qkv", "[B, S, (H + 2K) D] or [T, (H + 2K) D]", f"shape {checks.shape_text(qkv.shape)}", "Flatten heads and their width into the last dimension.")
    checks.positive(operator, "num_heads", num_heads)
    checks.positive(operator, "num_kv_heads", num_kv_heads)
    heads = num_heads + 2 * num_kv_heads
    if qkv.shape[-1] % heads or not qkv.shape[-1]:
        checks.fail(operator, "qkv", f"of a last dimension that {heads} heads divide ({num_heads} + 2 x {num_kv_heads})", f"shape {checks.shape_text(qkv.shape)}", "Check num_heads and num_kv_heads.")
    batch, seq = (1, qkv.shape[0]) if qkv.dim() == 2 else qkv.shape[:2]
    return _check_tables(operator, qkv, batch, seq, qkv.shape[-1] // heads, cos, sin, position_ids, rotary_dim)


class _RopeQkvInPlace(torch.autograd.Function):
    """As _RopeQkv, writing into the tensor. The gradient is turned back in a buffer of its own: others may hold the incoming one."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None,
        num_heads: int, num_kv_heads: int, rotary_dim: int, interleaved: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.options = num_heads, num_kv_heads, rotary_dim, interleaved, qkv.dtype
        ctx.mark_dirty(qkv)
        turn_packed_(qkv, cos, sin, position_ids, num_heads, num_kv_heads, rotary_dim, interleaved)
        return qkv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv: torch.Tensor) -> tuple[Any, ...]:
        return _apply_packed(OP.bwd, dqkv, *ctx.saved_tensors, *ctx.options), *(None,) * 7


def turn_packed_(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None,
    num_heads: int, num_kv_heads: int, rotary_dim: int, interleaved: bool, inverse: bool = False,
) -> None:  # fmt: skip
    """Turn, or turn back, the queries and keys of a packed tensor where they are, below autograd.

    For a backward that made `qkv` itself: an incoming gradient is not its own.
    """
    heads = num_heads + 2 * num_kv_heads
    x = _with_batch(qkv.unflatten(-1, (heads, qkv.shape[-1] // heads)), 4)
    TURN_IN_PLACE(x, cos, sin, position_ids, rotary_dim, num_heads + num_kv_heads, interleaved, inverse)


def rope_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
    position_ids: torch.Tensor | None = None,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """`rope_qkv` that writes into `qkv` and returns it: private, for the fresh result of a matrix product that nobody else holds.

    Autograd is told that the tensor changed, and refuses the backward of whoever had saved it. Under torch.compile the functional
    form runs: the compiler knows best which buffers are free.
    """
    width = _check_packed("rope_qkv_", qkv, cos, sin, num_heads, num_kv_heads, position_ids, rotary_dim)
    if any(step == 0 and size > 1 for size, step in zip(qkv.shape, qkv.stride(), strict=True)) or qkv.stride(-1) != 1:
        checks.fail("rope_qkv_", "qkv", "dense along its last dimension, each element in memory of its own", f"strides {qkv.stride()}", "Use rope_qkv.")
    if not settings.active() or torch.compiler.is_compiling():
        return rope_qkv(
            qkv, cos, sin, num_heads=num_heads, num_kv_heads=num_kv_heads, interleaved=interleaved, position_ids=position_ids, rotary_dim=width
        )
    if needs_grad(qkv):
        return _RopeQkvInPlace.apply(qkv, cos, sin, position_ids, num_heads, num_kv_heads, width, interleaved)
    turn_packed_(qkv, cos, sin, position_ids, num_heads, num_kv_heads, width, interleaved)
    return qkv


OP.public = {"rope": rope, "rope_qkv": rope_qkv}
