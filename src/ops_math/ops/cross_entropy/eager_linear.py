"""The linear layer and its loss in plain torch, by chunks of rows: the CPU implementation, and the yardstick for the others.

Roundings: x, weight and bias to the storage dtype; the logits to it once more; dlogits of the sum of losses (before the division by
a token count, so that fp16 does not underflow) to it, as an operand of the products with weight and x. Sums are in fp32. Gradients
stay in fp32 until they are multiplied with the loss's gradient and divided, and are rounded once then.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops_math.layout import as_rows
from ops_math.ops.cross_entropy import eager
from ops_math.ops.cross_entropy.problem_linear import LinearCrossEntropyProblem
from ops_math.spec import DTYPE_OF, compute_dtype

PASSES = 1.5
CALLS = 30
CHUNK = 2**21  # logits a chunk: 256 rows of 8,192; fewer rows make the products with the weight slower, more leave the cache
FEWEST_ROWS = 64
CHUNK_GPU = 2**28


def chunks(p: LinearCrossEntropyProblem, device: torch.device) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of rows whose logits exist together."""
    step = max(FEWEST_ROWS, (CHUNK if device.type == "cpu" else CHUNK_GPU) // p.cols)
    for start in range(0, p.rows, step):
        yield start, min(start + step, p.rows)


class Layer:
    """The operands of the products: rounded to the storage dtype, held in the dtype in which they are multiplied."""

    def __init__(self, p: LinearCrossEntropyProblem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.store = DTYPE_OF[p.store]
        self.dtype = compute_dtype(self.store)
        self.x = as_rows(x)
        self.weight = weight.to(self.store).to(self.dtype)
        self.bias = None if bias is None else bias.to(self.store).to(self.dtype)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """x [chunk, H], rounded to the storage dtype."""
        return self.x[start:stop].to(self.store).to(self.dtype)

    def logits(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x weight^T + bias [chunk, V], rounded to the storage dtype."""
        z = torch.mm(x, self.weight.t(), out=out) if self.bias is None else torch.addmm(self.bias, x, self.weight.t(), out=out)
        return z if self.store == self.dtype else z.copy_(z.to(self.store))


class Gradients:
    """dx, dweight and dbias in the accumulating dtype, of the sum of losses; empty where not needed."""

    def __init__(self, p: LinearCrossEntropyProblem, layer: Layer) -> None:
        self.layer = layer
        device = layer.x.device
        shapes = ((p.rows, p.hidden) if p.need_dx else (0,)), ((p.cols, p.hidden) if p.need_dw else (0,)), ((p.cols,) if p.need_db else (0,))
        self.dx, self.dw, self.db = (torch.empty(shape, dtype=layer.dtype, device=device) for shape in shapes)
        self.need_dx, self.need_dw, self.need_db = p.need_dx, p.need_dw, p.need_db
        if p.rows == 0:
            self.dw.zero_(), self.db.zero_()

    def add(self, start: int, stop: int, x: torch.Tensor, dlogits: torch.Tensor) -> None:
        """The contribution of a chunk; the first one overwrites."""
        if self.layer.store != self.layer.dtype:
            dlogits.copy_(dlogits.to(self.layer.store))
        if self.need_dx:
            torch.mm(dlogits, self.layer.weight, out=self.dx[start:stop])
        if self.need_dw:
            torch.mm(dlogits.t(), x, out=self.dw) if start == 0 else self.dw.addmm_(dlogits.t(), x)
        if self.need_db:
            torch.sum(dlogits, 0, out=self.db) if start == 0 else self.db.add_(dlogits.sum(0))


def launch_fwd(
    p: LinearCrossEntropyProblem,
    config: None,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The loss, lse [rows], the divisor of the mean, and (where `when` is forward) dx, dweight, dbias of the sum of losses."""
    layer = Layer(p, x, weight, bias)
    class_weight = None if class_weight is None else class_weight.to(layer.dtype)
    rows = eager.read_targets(p.loss, target, class_weight, layer.dtype)
    loss, lse = (torch.empty(p.rows, dtype=layer.dtype, device=x.device) for _ in range(2))
    grads = Gradients(p, layer) if p.when == "forward" else None
    buffer = None
    for start, stop in chunks(p, x.device):
        xs = layer.rows(start, stop)
        buffer = torch.empty((stop - start, p.cols), dtype=layer.dtype, device=x.device) if buffer is None else buffer[: stop - start]
        layer.logits(xs, buffer)
        for first, last in eager.chunks(stop - start, p.cols, x.device):
            part, at = buffer[first:last], slice(start + first, start + last)
            z = eager.capped(p.loss, part, layer.dtype)
            loss[at], lse[at], total = eager.row_losses(p.loss, z, rows.part(at.start, at.stop), class_weight, part)
            if grads is not None:
                eager.row_gradients(p.loss, part, z if p.softcap else None, rows.part(at.start, at.stop), lse[at], None, class_weight, over=total)
        if grads is not None:
            grads.add(start, stop, xs, buffer)
    reduced, divisor = eager.reduce(p.loss, loss, rows, num_tokens)
    none = loss.new_empty(0)
    results = (none, none.clone(), none.clone()) if grads is None else (grads.dx, grads.dw, grads.db)
    return reduced.view(target.shape) if p.reduction == "none" else reduced, lse, divisor, *results


def launch_bwd(
    p: LinearCrossEntropyProblem,
    config: None,
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    lse: torch.Tensor,
    divisor: torch.Tensor | None,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dweight, dbias: those of the forward scaled, or computed anew from recomputed logits."""
    if p.when == "forward":
        return finish(p, x, dloss, divisor, dx, dweight, dbias)
    layer = Layer(p, x, weight, bias)
    class_weight = None if class_weight is None else class_weight.to(layer.dtype)
    rows = eager.read_targets(p.loss, target, class_weight, layer.dtype)
    per_row, common = row_scales(p, dloss, layer.dtype)
    grads = Gradients(p, layer)
    buffer = None
    for start, stop in chunks(p, dloss.device):
        xs = layer.rows(start, stop)
        buffer = torch.empty((stop - start, p.cols), dtype=layer.dtype, device=dloss.device) if buffer is None else buffer[: stop - start]
        layer.logits(xs, buffer)
        for first, last in eager.chunks(stop - start, p.cols, dloss.device):
            part, at = buffer[first:last], slice(start + first, start + last)
            z = eager.capped(p.loss, part, layer.dtype)
            torch.sub(z, lse[at, None], out=part).exp_()
            eager.row_gradients(p.loss, part, z if p.softcap else None, rows.part(at.start, at.stop), lse[at], None if per_row is None else per_row[at], class_weight)
        grads.add(start, stop, xs, buffer)
    return finish(p, x, common, divisor, grads.dx, grads.dw, grads.db)


def row_scales(p: LinearCrossEntropyProblem, dloss: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What dlogits are multiplied with before they are rounded [rows], at most 1 in size, and what the gradients are after it []."""
    if p.reduction != "none":
        return None, dloss
    flat = dloss.reshape(-1).to(dtype)
    largest = flat.abs().amax() if p.rows else flat.new_ones(())
    common = torch.where(largest == 0, 1.0, largest)
    return flat / common, common


def factor_of(scale: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
    """scale / divisor []; 0 where the divisor is 0, which means that no row is kept."""
    return scale if divisor is None else torch.where(divisor == 0, 0.0, scale / divisor)


def finish(
    p: LinearCrossEntropyProblem, x: torch.Tensor, scale: torch.Tensor, divisor: torch.Tensor | None, dx: torch.Tensor | None, dw: torch.Tensor | None, db: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients times scale / divisor, each rounded once to its input's dtype."""
    factor = factor_of(scale, divisor)
    results = []
    for grad, name, needed in ((dx, p.x, p.need_dx), (dw, p.weight, p.need_dw), (db, p.bias or p.weight, p.need_db)):
        out = torch.empty(grad.shape if needed and grad is not None else (0,), dtype=DTYPE_OF[name], device=x.device)
        results.append(torch.mul(grad, factor, out=out) if needed and grad is not None else out)
    return results[0].view(x.shape) if p.need_dx else results[0], results[1], results[2]
