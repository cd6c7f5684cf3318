"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

Rows are worked through in chunks that stay in a core's cache, so that its passes over them cost little more than their arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ops_math.layout import as_rows
from ops_math.ops.cross_entropy.problem import CrossEntropyProblem
from ops_math.spec import compute_dtype

PASSES = 1.5
CALLS = 12
CHUNK = 2**18  # logits a thread and chunk: 1 MiB in fp32, half of a core's second-level cache
CHUNK_GPU = 2**26


class Rows(NamedTuple):
    """What the targets say, row by row [rows]: a class that can be read, whether the row is kept, its class's weight (0 where
    ignored, NaN where the target is outside the vocabulary), 1 (0, NaN in the same places), and the sum of all class weights."""

    index: torch.Tensor  # type: ignore[assignment]  # takes the place of tuple.index, which nobody needs here
    kept: torch.Tensor
    weight: torch.Tensor
    one: torch.Tensor
    weight_sum: torch.Tensor | float

    def part(self, start: int, stop: int) -> Rows:
        """Rows start to stop."""
        if stop - start == self.index.shape[0]:
            return self
        return Rows(self.index[start:stop], self.kept[start:stop], self.weight[start:stop], self.one[start:stop], self.weight_sum)


def read_targets(p: CrossEntropyProblem, target: torch.Tensor, class_weight: torch.Tensor | None, dtype: torch.dtype) -> Rows:
    """No value of `target` is trusted as an index before it was compared with the vocabulary."""
    y = target.reshape(-1)
    kept = y != p.ignore_index
    index = y.clamp(0, p.cols - 1)
    one = torch.where(kept, torch.where(index == y, 1.0, float("nan")), 0.0).to(dtype)
    index = index.long()
    if class_weight is None:
        return Rows(index, kept, one, one, float(p.cols))
    return Rows(index, kept, class_weight[index] * one, one, class_weight.sum())


def chunks(rows: int, cols: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of rows."""
    values = CHUNK * torch.get_num_threads() if device.type == "cpu" else CHUNK_GPU
    step = max(1, values // cols)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def capped(p: CrossEntropyProblem, logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The logits in the dtype of arithmetic, soft-capped where asked."""
    z = logits.to(dtype)
    return torch.mul(torch.tanh(z / p.softcap), p.softcap) if p.softcap else z


class Sums(NamedTuple):
    """A row's exponentials [rows]: its top logit, and relative to it those of all classes but the target, summed, and of the target.

    The sum over all classes would have lost what the others hold where the target's probability is near 1.
    """

    top: torch.Tensor
    others: torch.Tensor
    own: torch.Tensor

    @property
    def log_total(self) -> torch.Tensor:
        """The logsumexp less the top; `own` is 1 where `others` may be small."""
        return (self.own - 1).add_(self.others).log1p_()


def row_results(
    p: CrossEntropyProblem, rows: Rows, sums: Sums, z_target: torch.Tensor, smooth: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss [rows], and what the gradient needs of a row [rows, 3]: the top logit, and a and b of dz = a exp(z - top) - s w / V, with b in
    place of the first term at the target. `smooth` is the sum of w (z - top).

    dz = p (u w_y + s W / V + 2 c lse) - u w_y [class = y] - s w / V with u = 1 - s, smoothing s, z-loss c, W the sum of class weights.
    b holds p - 1 as minus the other classes' share, so that no 1 is subtracted from a probability near it. An ignored row, which others
    do not read, has top = inf, so that every exponential of it is 0, and a = b = 0.
    """
    log_total, total = sums.log_total, sums.others + sums.own
    at_target = rows.weight * (1 - p.label_smoothing)
    loss = (sums.top - z_target).add_(log_total).mul_(at_target)  # near probability 1, lse - z_target would cancel
    a, b = at_target, -at_target * sums.others
    if smooth is not None:
        loss += (log_total * rows.weight_sum - smooth) * rows.one * (p.label_smoothing / p.cols)
        on_each = rows.one * (rows.weight_sum * (p.label_smoothing / p.cols))
        a, b = a + on_each, b + on_each * sums.own
    if p.z_loss:
        lse = sums.top + log_total
        loss += lse.square() * rows.one * p.z_loss
        on_each = rows.one * lse * (2 * p.z_loss)
        a, b = a + on_each, b + on_each * sums.own
    of_kept = ((loss, 0.0), (sums.top, math.inf), (a / total, 0.0), (b / total, 0.0))
    loss, *factors = (torch.where(rows.kept, value, otherwise) for value, otherwise in of_kept)
    return loss, torch.stack(factors, 1)


def row_losses(
    p: CrossEntropyProblem, z: torch.Tensor, rows: Rows, class_weight: torch.Tensor | None, buffer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss [rows] and factors [rows, 3] of capped logits; `buffer`, which may be z, is left holding exp(z - top), 0 for the target."""
    index, smooth = rows.index[:, None], None
    z_target = z.gather(1, index)[:, 0]
    top = z.amax(1, keepdim=True).clamp_(min=torch.finfo(z.dtype).min)  # a row of -inf has lse -inf, not NaN
    shifted = torch.sub(z, top, out=buffer)
    if p.label_smoothing:
        smooth = shifted.sum(1) if class_weight is None else shifted @ class_weight
    exponentials = shifted.exp_()
    own = exponentials.gather(1, index)[:, 0]
    sums = Sums(top[:, 0], exponentials.scatter_(1, index, 0.0).sum(1), own)
    return row_results(p, rows, sums, z_target, smooth)


def row_gradients(
    p: CrossEntropyProblem,
    exponentials: torch.Tensor,
    capped_z: torch.Tensor | None,
    rows: Rows,
    factors: torch.Tensor,
    scale: torch.Tensor | None,
    class_weight: torch.Tensor | None,
) -> torch.Tensor:
    """dlogits of the sum of losses times `scale` [rows], written over `exponentials`, exp(z - top), whatever they are at the target.

    dz is that of `row_results`; dlogits = dz (1 - (z / cap)^2).
    """
    a, b = (torch.where(rows.kept, f if scale is None else f * scale, 0.0)[:, None] for f in factors.unbind(1)[1:])
    dz = exponentials.mul_(a).scatter_(1, rows.index[:, None], b)
    if p.label_smoothing:
        smooth = torch.where(rows.kept, rows.one if scale is None else rows.one * scale, 0.0) * (p.label_smoothing / p.cols)
        dz.sub_(smooth[:, None]) if class_weight is None else dz.addr_(smooth, class_weight, alpha=-1)
    if capped_z is not None:
        dz.mul_(1 - (capped_z / p.softcap).square_())
    return dz


def reduce(p: CrossEntropyProblem, loss: torch.Tensor, rows: Rows, num_tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The reduced loss, and the divisor of the mean (empty for the others)."""
    if p.reduction == "none":
        return loss, loss.new_empty(0)
    total = loss.sum()
    if p.reduction == "sum":
        return total, loss.new_empty(0)
    divisor = rows.weight.sum() if num_tokens is None else mean_divisor(num_tokens, rows.kept, loss.dtype)
    return total / divisor, divisor


def mean_divisor(num_tokens: torch.Tensor, kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The token count, or 1 where no rank has a token."""
    return torch.where((num_tokens == 0) & ~kept.any(), 1, num_tokens).to(dtype)


def launch_fwd(
    p: CrossEntropyProblem,
    config: None,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, factors [rows, 3], and the divisor of the mean (empty without one)."""
    dtype = compute_dtype(logits.dtype)
    weight = None if class_weight is None else class_weight.to(dtype)
    x, rows = as_rows(logits), read_targets(p, target, weight, dtype)
    losses, factors = [], []
    buffer = None
    for start, stop in chunks(p.rows, p.cols, x.device):
        z = capped(p, x[start:stop], dtype)
        if buffer is None:
            buffer = torch.empty(z.shape, dtype=dtype, device=z.device)
        loss, factors_M3 = row_losses(p, z, rows.part(start, stop), weight, buffer[: stop - start])
        losses.append(loss)
        factors.append(factors_M3)
    loss, factors_M3 = (
        pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else x.new_empty(shape, dtype=dtype)
        for pieces, shape in ((losses, (0,)), (factors, (0, 3)))
    )  # fmt: skip
    reduced, divisor = reduce(p, loss, rows, num_tokens)
    return reduced.view(target.shape) if p.reduction == "none" else reduced, factors_M3, divisor


def launch_bwd(
    p: CrossEntropyProblem,
    config: None,
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    factors: torch.Tensor,
    divisor: torch.Tensor | None,
) -> torch.Tensor:
    """dlogits, of the dtype and shape of the logits."""
    dtype = factors.dtype
    weight = None if class_weight is None else class_weight.to(dtype)
    x, rows = as_rows(logits), read_targets(p, target, weight, dtype)
    scale = (dloss if divisor is None else dloss / divisor).reshape(-1).to(dtype).expand(p.rows)
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    out = dlogits.view(p.rows, p.cols)
    for start, stop in chunks(p.rows, p.cols, x.device):
        z, part = capped(p, x[start:stop], dtype), out[start:stop]
        buffer = part if part.dtype == dtype else torch.empty(part.shape, dtype=dtype, device=part.device)
        torch.sub(z, factors[start:stop, :1], out=buffer).exp_()
        row_gradients(p, buffer, z if p.softcap else None, rows.part(start, stop), factors[start:stop], scale[start:stop], weight)
        if buffer is not part:
            part.copy_(buffer)
    return dlogits
