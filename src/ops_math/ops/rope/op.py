"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ops_math import checks, settings
from ops_math.dispatch import absent, apply, define, needs_grad, once_differentiable, store_dtype
from ops_math.ops.rope import plain
from ops_math.ops.rope.problem import RopeProblem
from ops_math.spec import dtype_name as name_of
from ops_math.usual import Usual

Tensor = torch.Tensor


def problem(
    x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
    rotary_dim: int, num_rotated: int, interleaved: bool, out: torch.dtype,
) -> RopeProblem:  # fmt: skip
    """The problem of a dispatcher call."""
    batch, seq, heads, width = x.shape
    kv_heads = 0 if k is None else k.shape[2]
    table_batch = cos.shape[0] if cos.dim() == 3 else 1
    positions = "" if position_ids is None else name_of(position_ids.dtype)
    names = name_of(x.dtype), name_of(out), name_of(cos.dtype)
    return RopeProblem(batch, seq, heads, kv_heads, width, rotary_dim, num_rotated, *names, table_batch, positions, interleaved)


def _fake(
    x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
    rotary_dim: int, num_rotated: int, interleaved: bool, out: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape, dtype=out), absent(x) if k is None else k.new_empty(k.shape, dtype=out)


_SCHEMA = (
    "(Tensor x, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, int rotary_dim, int num_rotated, bool interleaved, ScalarType out)"
    " -> (Tensor, Tensor)"
)

OP = define(
    "rope",
    __package__,
    fwd=_SCHEMA,
    bwd=_SCHEMA,
    fake_fwd=_fake,
    fake_bwd=_fake,
    problem_fwd=problem,
    problem_bwd=problem,
    implementations=("triton_gpu", "eager", "inductor"),
)


class Heads(NamedTuple):
    """How columns are heads and which of them are turned: H (0 where q and k are apart), K, the rotary width R, and the convention."""

    num_heads: int
    num_kv_heads: int
    rotary_dim: int
    interleaved: bool

    def unpack(self, qkv: Tensor) -> Tensor:
        """[..., (H + 2K) D] as [B, S, H + 2K, D]."""
        heads = self.num_heads + 2 * self.num_kv_heads
        return with_batch(qkv.unflatten(-1, (heads, qkv.shape[-1] // heads)))


def with_batch(x: Tensor) -> Tensor:
    """[T, H, D] as [1, T, H, D]."""
    return x if x.dim() == 4 else x.unsqueeze(0)


def _turn(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, heads: Heads, out: torch.dtype
) -> tuple[Tensor, ...]:
    x = with_batch(q)
    turned = OP.fwd(x, with_batch(k), cos, sin, position_ids, heads.rotary_dim, x.shape[2], heads.interleaved, out)
    return turned if q.dim() == 4 else tuple(t.squeeze(0) for t in turned)


def turn_packed(op: Any, qkv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, heads: Heads, out: torch.dtype) -> Tensor:
    """The queries and keys of a packed tensor turned by the forward or the backward operator."""
    num_rotated = heads.num_heads + heads.num_kv_heads
    return op(heads.unpack(qkv), None, cos, sin, position_ids, heads.rotary_dim, num_rotated, heads.interleaved, out)[0].view(qkv.shape)


class _Rope(torch.autograd.Function):
    """q and k turned; saves the tables and nothing of q and k."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, heads: Heads, out: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.set_materialize_grads(False)
        ctx.options = heads, q.dtype
        turned = _turn(q, k, cos, sin, position_ids, heads, out)
        ctx.mark_non_differentiable(*(t for t, needed in zip(turned, ctx.needs_input_grad[:2], strict=True) if not needed))
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Any, ...]:
        heads, dtype = ctx.options
        if dq is None and dk is None:
            return (None,) * 7
        first, second = (dk, None) if dq is None else (dq, dk)
        x, other = with_batch(first), None if second is None else with_batch(second)
        turned = OP.bwd(x, other, *ctx.saved_tensors, heads.rotary_dim, x.shape[2], heads.interleaved, dtype)
        grads = turned[0].view(first.shape), None if second is None else turned[1].view(second.shape)
        return *(grads[::-1] if dq is None else grads), *(None,) * 5


class _RopeQkv(torch.autograd.Function):
    """The heads of q and k in a packed tensor turned; saves the tables and nothing of the tensor."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, heads: Heads, out: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.options = heads, qkv.dtype
        return turn_packed(OP.fwd, qkv, cos, sin, position_ids, heads, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv: Tensor) -> tuple[Any, ...]:
        return turn_packed(OP.bwd, dqkv, *ctx.saved_tensors, *ctx.options), *(None,) * 5


def check_tables(
    operator: str, tokens: tuple[int, ...], width: int, x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
    rotary_dim: int | None,
) -> int:  # fmt: skip
    """Check tables and positions against the tokens ([B, S] or [T]); returns the rotary width R."""
    batch, seq = tokens if len(tokens) == 2 else (1, *tokens)
    for name, table in (("cos", cos), ("sin", sin)):
        checks.floating(operator, name, table)
        checks.no_gradient(operator, name, table)
    if cos.dim() not in (2, 3):
        got = f"shape {checks.shape_text(cos.shape)}"
        checks.fail(operator, "cos", "[rows, R/2], [rows, R] or [batch, seq, R]", got, "Drop or add dimensions.")
    checks.same_shape(operator, "cos", cos, "sin", sin)
    checks.same_dtype(operator, "cos", cos, "sin", sin)
    checks.same_device(operator, "q", x, cos=cos, sin=sin, position_ids=position_ids)
    if position_ids is not None:
        _check_positions(operator, batch, seq, cos, position_ids)
    elif cos.dim() == 3 and (cos.shape[0] not in (1, batch) or cos.shape[1] != seq):
        needs, got = f"[{batch}, {seq}, R] or [1, {seq}, R], a row for each token", f"shape {checks.shape_text(cos.shape)}"
        checks.fail(operator, "cos", needs, got, "Gather the rows of the tokens first.")
    elif cos.dim() == 2 and cos.shape[0] < seq:
        needs, got = f"a table of at least {seq} rows, one for each token", f"shape {checks.shape_text(cos.shape)}"
        checks.fail(operator, "cos", needs, got, "Make longer tables, or pass position_ids.")
    return _rotary_dim(operator, width, cos, rotary_dim)


def _check_positions(operator: str, batch: int, seq: int, cos: Tensor, position_ids: Tensor) -> None:
    checks.integer(operator, "position_ids", position_ids)
    if cos.dim() == 3:
        needs = "None with tables of three dimensions, which have a row for each token"
        checks.fail(operator, "position_ids", needs, "both", "Pass tables [rows, R/2] or drop position_ids.")
    if tuple(position_ids.shape) not in ((seq,), (1, seq), (batch, seq)):
        needs, got = f"[{seq}] or [{batch}, {seq}], one for each token", f"shape {checks.shape_text(position_ids.shape)}"
        checks.fail(operator, "position_ids", needs, got, "Check that it comes from the same batch.")
    if settings.STATE.checked and position_ids.numel():
        low, high = (int(v) for v in position_ids.aminmax())
        checks.positions(operator, low, high, cos.shape[0])


def _rotary_dim(operator: str, width: int, cos: Tensor, rotary_dim: int | None) -> int:
    """R from the tables' width W. Three dimensions: W. Two: W where it passes half of the head's width D, D where W = D/2."""
    table = cos.shape[-1]
    if rotary_dim is None:
        if cos.dim() == 2 and 2 * table < width:
            needs = f"given, since a table of width {table} may be R = {table} with duplicated halves or R/2 of R = {2 * table}"
            checks.fail(operator, "rotary_dim", needs, "None", f"Pass rotary_dim={table} or rotary_dim={2 * table}.")
        rotary_dim = width if cos.dim() == 2 and 2 * table == width else table
    if not 0 < rotary_dim <= width or rotary_dim % 2:
        needs = f"even, above 0 and at most the head's width {width}"
        checks.fail(operator, "rotary_dim", needs, str(rotary_dim), "Check the tables' last dimension.")
    if table not in (rotary_dim, rotary_dim // 2):
        needs = f"of last dimension {rotary_dim // 2} or {rotary_dim} (rotary_dim {rotary_dim})"
        checks.fail(operator, "cos", needs, f"shape {checks.shape_text(cos.shape)}", "Check rotary_dim.")
    return rotary_dim


_ROPE = Usual(_Rope)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *,
    interleaved: bool = False, position_ids: Tensor | None = None, rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    Determinism: level 3; a token's result depends on nothing but the token.
    Raises: ArgumentError for shapes, dtypes or devices that do not fit, tables that require grad, and, where values are looked at
        (on the CPU, or under `checked`), positions outside the tables. On a GPU an outside position gives NaN.
    Source: Su et al., RoFormer, 2021; the gradient is the transposed rotation.
    """
    way = None if position_ids is not None else _ROPE.way(q, k, cos, sin, rotary_dim, interleaved)  # positions are values
    if way is None:
        _check_heads("rope", q, k)
        width = check_tables("rope", tuple(q.shape[:-2]), q.shape[-1], q, cos, sin, position_ids, rotary_dim)
        if not settings.active():
            return plain.rope(q, k, cos, sin, interleaved=interleaved, position_ids=position_ids, rotary_dim=width)
        heads = Heads(0, 0, width, interleaved)
        way = _ROPE.first((q, k, cos, sin), (rotary_dim, interleaved), store_dtype(q), heads, keep=position_ids is None)
    turned: Any = _turn if way.record is None else way.record
    return turned(q, k, cos, sin, position_ids, way.more, way.out)


def _check_heads(operator: str, q: Tensor, k: Tensor) -> None:
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
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
) -> Tensor:
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
    Determinism: as `rope`.
    Raises: ArgumentError as `rope`, and for a last dimension that H + 2K does not divide.
    Source: as `rope`.
    """
    heads = check_packed("rope_qkv", qkv, cos, sin, position_ids, num_heads, num_kv_heads, rotary_dim, interleaved)
    if not settings.active():
        return plain.rope_qkv(qkv, cos, sin, position_ids=position_ids, **heads._asdict())
    out = store_dtype(qkv)
    if needs_grad(qkv):
        return apply(_RopeQkv, qkv, cos, sin, position_ids, heads, out)
    return turn_packed(OP.fwd, qkv, cos, sin, position_ids, heads, out)


def check_packed(
    operator: str, qkv: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
    num_heads: int, num_kv_heads: int, rotary_dim: int | None, interleaved: bool,
) -> Heads:  # fmt: skip
    """Check a packed call; returns its heads with the rotary width found."""
    checks.floating(operator, "qkv", qkv)
    if qkv.dim() not in (2, 3):
        needs, got = "[B, S, (H + 2K) D] or [T, (H + 2K) D]", f"shape {checks.shape_text(qkv.shape)}"
        checks.fail(operator, "qkv", needs, got, "Flatten heads and their width into the last dimension.")
    checks.positive(operator, "num_heads", num_heads)
    checks.positive(operator, "num_kv_heads", num_kv_heads)
    heads = num_heads + 2 * num_kv_heads
    if qkv.shape[-1] % heads or not qkv.shape[-1]:
        needs = f"of a last dimension that {heads} heads divide ({num_heads} + 2 x {num_kv_heads})"
        checks.fail(operator, "qkv", needs, f"shape {checks.shape_text(qkv.shape)}", "Check num_heads and num_kv_heads.")
    width = check_tables(operator, tuple(qkv.shape[:-1]), qkv.shape[-1] // heads, qkv, cos, sin, position_ids, rotary_dim)
    return Heads(num_heads, num_kv_heads, width, interleaved)


OP.public = {"rope": rope, "rope_qkv": rope_qkv}
