"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

from ops_math.spec import ITEM_SIZE, Call, Case, Cost


class RopeProblem(NamedTuple):
    """One call. Of the `heads` of the first tensor the first `num_rotated` are turned and the rest copied (the values of a packed
    tensor); `kv_heads` is 0 where there is no second tensor. `table_batch` is 1 for tables that all sequences share, `positions`
    a dtype name, empty where token s takes row s. `inverse` turns back (in place only: elsewhere the phase says it)."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    num_rotated: int
    x: str
    out: str
    table: str
    table_batch: int
    positions: str
    interleaved: bool
    inverse: bool = False


def storage(p: RopeProblem) -> str:
    """The dtype the problem is stored in."""
    return p.x


def cost(p: RopeProblem, phase: str) -> Cost:
    """Each head read and written once, each table row read once."""
    tokens = p.batch * p.seq
    touched = p.num_rotated if phase == "inplace" else p.heads + p.kv_heads
    n = tokens * touched * (p.rotary_dim if phase == "inplace" else p.head_dim)
    tables = p.table_batch * p.seq * p.rotary_dim * ITEM_SIZE[p.table]
    positions = tokens * {"": 0, "int32": 4, "int64": 8}[p.positions]
    flops = 3 * tokens * (p.num_rotated + p.kv_heads) * p.rotary_dim
    return Cost(
        (("x", n * ITEM_SIZE[p.x]), ("tables", tables), ("positions", positions)), (("y", n * ITEM_SIZE[p.out]),), (("turn", flops),)
    )


def _qk(
    batch: int, seq: int, heads: int, kv_heads: int, width: int, table: int, rows: int = 0, tables: str | None = None, **options: Any
) -> Any:
    """q and k with tables [rows, table] in the dtype `tables`; cosines and sines need not lie on a circle."""

    def make(d: Any) -> Call:
        args = (d.normal(batch, seq, heads, width), d.normal(batch, seq, kv_heads, width))
        return Call((*args, *(d.normal(rows or seq, table, dtype=tables) for _ in range(2))), dict(options))

    return make


def _packed(batch: int, seq: int, heads: int, kv_heads: int, width: int, **options: Any) -> Any:
    def make(d: Any) -> Call:
        x = d.normal(batch, seq, (heads + 2 * kv_heads) * width)
        return Call((x, d.normal(seq, width // 2), d.normal(seq, width // 2)), {"num_heads": heads, "num_kv_heads": kv_heads, **options})

    return make


def _duplicated(d: Any) -> Call:
    cos, sin = (d.normal(9, 32).repeat(1, 2) for _ in range(2))
    return Call((d.normal(2, 9, 4, 64), d.normal(2, 9, 2, 64), cos, sin), {})


def _per_sequence(batch: int) -> Any:
    def make(d: Any) -> Call:
        cos, sin = (d.normal(batch, 7, 16).repeat(1, 1, 2) for _ in range(2))
        return Call((d.normal(3, 7, 4, 32), d.normal(3, 7, 2, 32), cos, sin), {})

    return make


def _ids(d: Any, *shape: int) -> Any:
    return d.ints(20, *shape)


def _with_ids(*shape: int, **options: Any) -> Any:
    def make(d: Any) -> Call:
        cos, sin = d.normal(20, 32), d.normal(20, 32)
        return Call((d.normal(2, 11, 3, 64), d.normal(2, 11, 1, 64), cos, sin), {"position_ids": _ids(d, *shape), **options})

    return make


def _views(d: Any) -> Call:
    """q and k as views of one packed tensor, heads before tokens for k."""
    qk = d.normal(2, 6, 6, 32)
    k = d.normal(2, 3, 6, 32).transpose(1, 2)
    return Call((qk[:, :, 1:5], k, d.normal(6, 16), d.normal(6, 16)), {})


def _tokens(d: Any) -> Call:
    return Call((d.normal(13, 4, 64), d.normal(13, 2, 64), d.normal(40, 32), d.normal(40, 32)), {"position_ids": _ids(d, 13)})


def _packed_view(d: Any) -> Call:
    x = d.normal(2, 5, 8 * 16 + 32)[..., 16 : 16 + 128]
    return Call((x, d.normal(5, 8), d.normal(5, 8)), {"num_heads": 4, "num_kv_heads": 2})


def _packed_tokens(d: Any) -> Call:
    x = d.normal(12, 8 * 32)
    return Call((x, d.normal(20, 16), d.normal(20, 16)), {"num_heads": 4, "num_kv_heads": 2, "position_ids": _ids(d, 12)})


_TABLES, _PACKED_TABLES = (2, 3), (1, 2)

CASES = (
    Case("plain", "rope", _qk(2, 7, 4, 2, 64, 32), frozen=_TABLES),
    Case("width 128, tables longer than the sequence", "rope", _qk(1, 9, 8, 2, 128, 64, rows=33), frozen=_TABLES),
    Case("width 80", "rope", _qk(2, 5, 3, 3, 80, 40), frozen=_TABLES),
    Case("fp32 tables", "rope", _qk(2, 9, 4, 1, 64, 32, tables="fp32"), frozen=_TABLES, dtypes=("bf16", "fp16")),
    Case("fp32 tables, one position", "rope", _qk(48, 1, 12, 4, 64, 32, tables="fp32"), frozen=_TABLES, dtypes=("bf16", "fp16")),
    Case("duplicated halves", "rope", _duplicated, frozen=_TABLES),
    Case("tables for each sequence", "rope", _per_sequence(3), frozen=_TABLES),
    Case("tables with a batch of one", "rope", _per_sequence(1), frozen=_TABLES),
    Case("interleaved", "rope", _qk(2, 7, 4, 2, 64, 32, interleaved=True), frozen=_TABLES),
    Case("interleaved, width 80", "rope", _qk(1, 6, 5, 2, 80, 40, interleaved=True), frozen=_TABLES),
    Case("partial", "rope", _qk(2, 7, 4, 2, 80, 16, rotary_dim=32), frozen=_TABLES),
    Case("partial, odd rest", "rope", _qk(1, 7, 3, 1, 37, 10, rotary_dim=10), frozen=_TABLES),
    Case("partial, odd rest, interleaved", "rope", _qk(1, 7, 3, 1, 37, 10, rotary_dim=20, interleaved=True), frozen=_TABLES),
    Case("positions shuffled and repeated", "rope", _with_ids(2, 11), frozen=_TABLES),
    Case("positions shared", "rope", _with_ids(11), frozen=_TABLES),
    Case("positions, interleaved", "rope", _with_ids(2, 11, interleaved=True), frozen=_TABLES),
    Case("packed documents", "rope", _tokens, frozen=_TABLES),
    Case("no tokens", "rope", _qk(2, 0, 4, 2, 64, 32, rows=4), frozen=_TABLES),
    Case("one token", "rope", _qk(1, 1, 4, 2, 64, 32), frozen=_TABLES),
    Case("one head of two columns", "rope", _qk(1, 3, 1, 1, 2, 1), frozen=_TABLES),
    Case("48 heads", "rope", _qk(1, 3, 48, 5, 16, 8), frozen=_TABLES),
    Case("views", "rope", _views, frozen=_TABLES),
    Case("only q learns", "rope", _qk(2, 7, 4, 2, 64, 32), frozen=(1, *_TABLES)),
    Case("only k learns", "rope", _qk(2, 7, 4, 2, 64, 32), frozen=(0, *_TABLES)),
    Case("longer", "rope", _qk(2, 300, 16, 4, 128, 64), frozen=_TABLES, small=False),
    Case("packed qkv", "rope_qkv", _packed(2, 7, 4, 2, 64), frozen=_PACKED_TABLES),
    Case("packed qkv, equal heads", "rope_qkv", _packed(1, 9, 3, 3, 32), frozen=_PACKED_TABLES),
    Case("packed qkv, interleaved", "rope_qkv", _packed(2, 7, 4, 2, 64, interleaved=True), frozen=_PACKED_TABLES),
    Case("packed qkv, partial", "rope_qkv", _packed(2, 7, 4, 2, 64, rotary_dim=32), frozen=_PACKED_TABLES),
    Case("packed qkv, part of rows", "rope_qkv", _packed_view, frozen=_PACKED_TABLES),
    Case("packed qkv, packed documents", "rope_qkv", _packed_tokens, frozen=_PACKED_TABLES),
    Case("packed qkv, no tokens", "rope_qkv", _packed(2, 0, 4, 2, 64), frozen=_PACKED_TABLES),
)
