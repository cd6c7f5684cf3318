"""Which configurations of LayerNorm's kernels are legal for a problem, best guess first, and what their memory traffic is."""

from __future__ import annotations

from ops_math.layout import alignment
from ops_math.ops._tiles.ends import held, held_blocks, off_grid, persistent, widths
from ops_math.ops._tiles.rows import held_whole, limited, limits_hold, limits_known
from ops_math.ops.layer_norm import triton_gpu_held
from ops_math.ops.layer_norm.problem import LayerNormProblem
from ops_math.ops.layer_norm.triton_gpu_config import Config
from ops_math.spec import ITEM_SIZE, Device, cdiv, next_power_of_2

WIDEST = {"fwd": 16384, "bwd": 8192}  # columns held in registers; the backward holds two to three sums a column besides the row
WIDE_BLOCK = 4096
# Registers a thread by columns and warps, forward: one program more lies on a core, and nothing spills (sm_90, sm_100, Triton 3.6).
# H200, bf16, with and without: 8,192 columns 0.94 and 0.86 of a copy, 5,120 0.79 and 0.67, 16,384 0.89 and 0.59, 12,288 0.77 and 0.50,
# 1,024 1.01 and 1.00; at 4,096 0.94 and 0.95.
LIMITS = {(1024, 2): 64, (8192, 4): 128, (16384, 8): 128}
COLUMNS_M, COLUMNS_N = 16, 256  # tile of the sums over rows of wide problems
# H200, bf16, 28,672 columns: 0.63 and 0.56 of a copy, where PyTorch's own reach 0.53 and 0.37; 16,384 and 12,288 columns, whose sums are
# held, and whose rows are kept too: 0.63 and 0.82.
WIDE_PASSES, HELD_PASSES, KEPT_PASSES = {"fwd": 1.6, "bwd": 1.8}, 1.6, 1.3
GENERAL_PASSES = 5.6  # of the wide backward with dropout, a bias of x or a narrow copy: 0.18


def supports(p: LayerNormProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    if "fp64" in (p.x, p.residual, p.weight, p.bias, p.x_bias, p.out, p.dsum):
        return "has no fp64 kernel"
    return None


def is_wide(p: LayerNormProblem, phase: str) -> bool:
    """Whether a row that is not cut does not fit in registers; the mask's generator, or an address for each value, takes half of them."""
    return p.cols > WIDEST[phase] // (2 if p.dropout_p or p.x_bias or alignment(p.cols) == 1 else 1)


def _is_cut(p: LayerNormProblem, phase: str) -> bool:
    """Whether cutting rows at the 16-byte grid pays: where they can start anywhere, and forward where they are little wider than a power
    of two (H200, 1,164 columns: 0.73 of a copy forward where uncut rows reach 0.54, but 0.65 backward where they reach 0.68)."""
    return off_grid(p.cols, near=phase == "fwd") and p.cols <= WIDEST[phase] and not (p.dropout_p or p.x_bias or p.narrow)


def passes(p: LayerNormProblem, phase: str) -> float:
    """Memory traffic over the least possible."""
    if not is_wide(p, phase) or _is_cut(p, phase):
        return 1.0
    if phase == "bwd" and not _plain_bwd(p, phase):
        return GENERAL_PASSES
    most, kept = _most_held(p)
    blocks = held_blocks(p.cols)
    return WIDE_PASSES[phase] if phase == "fwd" or blocks > most else HELD_PASSES if blocks > kept else KEPT_PASSES


def configs(p: LayerNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """The legal configurations, best guess first."""
    if _is_cut(p, phase):
        return (*_cut_configs(p, device, phase), *invariant_configs(p, device, phase))
    whole, cut_too = invariant_configs(p, device, phase), tuple(c for c in _held_configs(p, device, phase) if c.ends)
    if phase == "bwd" and off_grid(p.cols) and p.cols <= WIDEST[phase] and not (p.dropout_p or p.x_bias or p.narrow):
        return (*whole, *_cut_configs(p, device, phase))
    # Each program writes sums of two parameters, as many bytes as three of its rows take, and they are read again: 663 rows are five a
    # program, and a third of their time goes there (H200, bf16, 15,993 columns: held 0.37 of a copy and by columns 0.35, beside a third
    # tensor 0.38 and 0.43). Of many rows both were measured at 12,001 columns, where neither keeps the row: 0.56 and 0.38.
    read_again = bool(cut_too) and cut_too[0].blocks > _most_held(p)[1]
    return (*whole, *cut_too) if read_again and p.rows < 8 * device.num_cores else (*cut_too, *whole)


def _cut_configs(p: LayerNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Rows cut at the 16-byte grid."""
    block_n, _ = widths(p.cols)
    # Values a tile, values a thread, stages, warps a core (0: one program for each tile). A thread of 16 values takes 80 registers forward
    # and 96 with a residual, of 32 values 145 and 166 (sm_90, Triton 3.6): with 32 warps a core, as rms_norm has, programs would run in
    # two rounds. Rows loaded ahead spill where few registers are left (sm_90: at 8,192 backward 8 bytes).
    if phase == "fwd":
        some = 20 if p.residual else 24
        wishes = ((2048, 16, 1, some), (2048, 32, 1, 12), (2048, 16, 1, 0))
        if block_n in (1024, 4096):  # H200, bf16, 1,164 columns: a row of one warp 0.73 of a copy, of two 0.68; 4,287: 0.74 and 0.73
            wishes = ((2048, 32, 1, 12), (2048, 16, 1, some), (2048, 16, 1, 0))
        elif block_n >= 8192:  # H200, bf16, 15,993 columns: 0.65 and 0.52 of a copy; one program for each tile 0.39 and 0.35
            wishes = ((2048, 32, 1, 16), (2048, 16, 1, 32))
        elif block_n <= 256:  # eight values a thread leave a row to one warp
            wishes = ((2048, 8, 1, 32), (2048, 8, 2, 32), (1024, 8, 1, 32), (4096, 16, 1, 32), (2048, 8, 1, 0))
    else:
        wishes = ((1024, 16, 1, 16), (1024, 16, 3, 12 if block_n < 4096 else 16), (1024, 8, 3, 16))
        if block_n == 1024:  # H200, bf16, 1,164 columns: 0.62 and 0.53 of a copy, beside a third tensor 0.58 and 0.41
            wishes = ((1024, 8, 3, 16), (1024, 16, 1, 16), (1024, 16, 3, 12))
        elif block_n >= 8192:
            wishes = ((1024, 16, 1, 16), (1024, 32, 1, 16))
        elif block_n <= 256:
            wishes = ((1024, 8, 1, 16), (1024, 8, 2, 16), (2048, 8, 1, 16), (2048, 16, 1, 16), (1024, 16, 1, 16))
    found = tuple(Config(*each) for each in persistent(p.rows, p.cols, wishes, device))
    if phase == "fwd" or block_n <= 256:
        return found
    late = _late_configs(p, device)
    # H200, bf16: 0.65 of a copy and 0.62 at 1,164 columns; beside a third tensor there 0.51 and 0.58, but 0.80 and 0.73 at 2,163.
    first = not p.dsum if block_n == 1024 else p.dsum and block_n in (2048, 4096)
    return (*late, *found) if first else (*found, *late)


def _late_configs(p: LayerNormProblem, device: Device) -> tuple[Config, ...]:
    """Backward, rows cut at the 16-byte grid, with the weight in no registers."""
    if not p.weight:
        return ()
    wishes = ((1024, 16, 3, 16), (1024, 8, 1, 24))
    if widths(p.cols)[0] == 1024:
        wishes = ((1024, 8, 1, 24), (1024, 16, 3, 16))
    return tuple(Config(*each, late=True) for each in persistent(p.rows, p.cols, wishes, device))


def invariant_configs(p: LayerNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Those whose order of sums does not follow a row's place among its neighbours, best guess first."""
    if is_wide(p, phase):
        not_cut = tuple(c for c in _held_configs(p, device, phase) if not c.ends)
        return not_cut + _columns_configs(p, device, phase) or _wide_configs(p, device)
    block_n = next_power_of_2(max(p.cols, 8 if p.dropout_p else 1))  # a tile of the mask has eight columns at least
    # Values a tile, values a thread, stages; the forward starts one program for each tile unless it loads ahead. The backward takes one
    # row where it can: four rows of 1,024 halve its speed (H200: 1,571 against 3,170 GB/s with two), since their sum crosses warps.
    if phase == "fwd":
        # Fewer warps win where a row's two sums are all there is to do (H200: 3,653 GB/s with 8 warps at 8,192, 2,597 with 16).
        first = 32 if block_n <= 1024 or not p.dropout_p else 16 if block_n <= 4096 else 8
        wishes = tuple(sorted(((2048, 16, 1), (4096, 16, 1), (2048, 32, 1), (2048, 8, 1), (2048, 16, 2)), key=lambda w: w[1] != first))
        if block_n >= 8192 and _may_be_limited(p, device):  # without a limit 0.85 of a copy, with half the values a thread 0.86
            wishes = ((2048, 64, 1), *wishes) if limits_hold() else (*wishes, (2048, 64, 1))
        if block_n < 1024:  # a narrow row is one warp's with 8 values a thread; larger tiles spill on sm_80 and sm_100 (8 bytes)
            wishes = ((1024, 8, 1), *wishes)
    elif p.dropout_p or p.x_bias:
        wishes = ((1024, 16, 2), (1024, 8, 2), (1024, 16, 1), (1024, 16, 3), (2048, 16, 2), (2048, 16, 3), (4096, 16, 2))
        if block_n == 1024:  # two rows hide the mask's arithmetic (H200, bf16: 3,327 against 2,210 GB/s with one)
            wishes = ((2048, 16, 2), *wishes)
        if block_n < 1024:  # sixteen values a thread spill there (sm_80, 16 bytes)
            wishes = ((1024, 8, 3), *wishes)
    else:
        wishes = ((1024, 16, 3), (2048, 16, 3), (1024, 8, 3), (1024, 16, 2), (1024, 16, 1), (2048, 16, 2))
        if block_n < 1024:  # sixteen values a thread spill there (sm_100, 24 bytes)
            wishes = ((1024, 8, 3), *wishes)
        elif block_n == 1024 and not p.dsum:  # two rows at a time: H200, bf16, 0.95 of a copy, one row 0.89
            wishes = ((2048, 16, 3), *(w for w in wishes if w != (2048, 16, 3)))
    one_by_one = alignment(p.cols) == 1 and _is_cut(p, phase)
    if one_by_one and phase == "fwd" and block_n >= (4096 if p.residual else 8192):
        # H200, bf16: 0.21 of a copy instead of 0.19 at 4,287 columns; at 2,163 with a residual 0.39 and 0.32, without it 0.23 and 0.25.
        wishes = ((2048, 16, 2), *(w for w in wishes if w != (2048, 16, 2)))
    if (one_by_one or 2 <= alignment(p.cols) < 16) and phase == "bwd" and block_n >= 4096:  # rows loaded ahead are slower or spill
        wishes = ((1024, 16, 1), *(w for w in wishes if w != (1024, 16, 1)))
    # Rows that are not read 16 bytes at a time take 148 registers a thread (sm_90, 1,164 columns, three stages).
    narrow = phase == "bwd" and alignment(p.cols) < 16 and block_n < 4096
    warps = ((*w, 32 if phase == "fwd" else 12 if narrow and w[2] == 3 and w[1] > 8 else 16) for w in wishes)
    found = tuple(Config(*fields) for fields in held_whole(p.rows, block_n, warps, device, phase))
    return tuple(limited(found, LIMITS)) if phase == "fwd" and _may_be_limited(p, device) else found


def _may_be_limited(p: LayerNormProblem, device: Device) -> bool:
    """Whether it is known how few registers the forward gets by with."""
    in_16_bits = all(ITEM_SIZE[dtype] == 2 for dtype in (p.x, p.weight, p.bias) if dtype)
    return in_16_bits and limits_known(p.cols, device) and not (p.residual or p.dropout_p or p.x_bias or p.narrow)


def _plain_bwd(p: LayerNormProblem, phase: str) -> bool:
    """Whether gradients of rows and of parameters are wanted, and nothing that only the general kernels do."""
    wanted = (p.need_dtotal or p.need_dx) and (p.need_dw or p.need_db)
    return phase == "bwd" and wanted and not (p.dropout_p or p.x_bias or p.narrow)


def _held_configs(p: LayerNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """For wide rows: the sums of the parameters' gradients in registers."""
    if p.cols <= WIDEST["bwd"] or not _plain_bwd(p, phase):
        return ()
    return tuple(Config(*fields) for fields in held(p.rows, p.cols, *_most_held(p), device))


def _most_held(p: LayerNormProblem) -> tuple[int, int]:
    """Blocks whose sums are held in registers at most; and where the row is kept there too."""
    return 2 * triton_gpu_held.MOST_BLOCKS // ITEM_SIZE[p.x], 2 * triton_gpu_held.KEPT_BLOCKS // ITEM_SIZE[p.x]


def _columns_configs(p: LayerNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """For wide rows: the rows' means first; programs by columns, so many that registers hold all (sm_90: 90 to 128 a thread)."""
    if not _plain_bwd(p, phase):
        return ()
    found = []
    wishes = (4, 512, 3), (4, 256, 3), (4, 512, 1)
    # Copies ahead are of eight bytes at least. H200, bf16: beside a third tensor 0.43 of a copy and 0.31 at 15,993 columns; without it 0.35
    # there and 0.35, but 0.35 and 0.38 at 12,001.
    if alignment(p.cols) < 8 and p.dsum:
        wishes = (4, 512, 1), (4, 512, 3)
    for block_m, block_n, num_stages in wishes:
        programs = min(4 * device.num_cores // cdiv(p.cols, block_n), cdiv(p.rows, block_m))
        if device.kind != "hip" or num_stages == 1:
            found.append(Config(block_m, block_n, 4, max(programs, 1), num_stages, by_columns=True))
    return tuple(found)


def _wide_configs(p: LayerNormProblem, device: Device) -> tuple[Config, ...]:
    """One row a program; the sums over rows are cut so that there are about four programs a core."""
    cuts = 4 * device.num_cores // max(p.cols // COLUMNS_N, 1)
    num_programs = max(min(cuts, -(-p.rows // COLUMNS_M)), 1)
    # H200, bf16, 15,993 columns forward: 0.32, 0.30 and 0.26 of a copy where rows are read value by value.
    warps = (8, 4, 16) if alignment(p.cols) == 1 else (16, 8, 4)
    return tuple(Config(1, WIDE_BLOCK, num_warps, num_programs, 1) for num_warps in warps)
