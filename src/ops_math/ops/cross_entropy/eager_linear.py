"""The linear layer and its loss in plain torch, by chunks of rows: the CPU implementation, and the yardstick for the others.

Roundings: x, weight and bias to the storage dtype; the logits to it once more; dlogits of the sum of losses (before the division by
a token count, so that fp16 does not underflow) to it, as an operand of the products with weight and x. Sums are in fp32. Gradients
stay in fp32 until they are multiplied with the loss's gradient and divided, and are rounded once then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ops_math import features
from ops_math.layout import as_rows
from ops_math.ops.cross_entropy import eager
from ops_math.ops.cross_entropy.problem_linear import LinearCrossEntropyProblem
from ops_math.spec import DTYPE_OF, Device, compute_dtype

PASSES = 1.5
CALLS = 30
CHUNK = 2**21  # logits a chunk: 256 rows of 8,192; fewer rows make the products with the weight slower, more leave the cache
FEWEST_ROWS = 64
CHUNK_BF16 = 2**23  # products are so fast that adding up the weight's gradient would dominate
CHUNK_GPU = 2**28


def configs(p: LinearCrossEntropyProblem, device: Device, phase: str) -> tuple[str, ...]:
    """`fp32_products`; first, where a CPU multiplies bf16 several times faster and it matters, `bf16_products`: each chunk's product
    is rounded to bf16 before it is added in fp32, once more than otherwise."""
    large = p.rows * p.hidden * p.cols >= 2**28
    if device.kind == "cpu" and p.store == "bf16" and large and features.fast_bf16_products():
        return "bf16_products", "fp32_products"
    return ("fp32_products",)


class Layer:
    """The operands of the products: rounded to the storage dtype, held in the dtype in which they are multiplied."""

    def __init__(self, p: LinearCrossEntropyProblem, config: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.store = DTYPE_OF[p.store]
        self.wide = compute_dtype(self.store)
        self.dtype = self.store if config == "bf16_products" else self.wide
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
        shapes = (
            ((p.rows, p.hidden) if p.need_dx else (0,)),
            ((p.cols, p.hidden) if p.need_dw else (0,)),
            ((p.cols,) if p.need_db else (0,)),
        )
        self.dx, self.dw, self.db = (torch.empty(shape, dtype=layer.wide, device=device) for shape in shapes)
        self.need_dx, self.need_dw, self.need_db = p.need_dx, p.need_dw, p.need_db
        if p.rows == 0:
            self.dw.zero_()
            self.db.zero_()

    def add(self, start: int, stop: int, x: torch.Tensor, dlogits: torch.Tensor) -> None:
        """The contribution of a chunk; the first one overwrites."""
        if self.layer.store != self.layer.dtype:
            dlogits.copy_(dlogits.to(self.layer.store))
        if self.need_dx:
            self._product(dlogits, self.layer.weight, self.dx[start:stop], fresh=True)
        if self.need_dw:
            self._product(dlogits.t(), x, self.dw, fresh=start == 0)
        if self.need_db:
            sums = dlogits.sum(0, dtype=self.layer.wide)
            self.db.copy_(sums) if start == 0 else self.db.add_(sums)

    def _product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, fresh: bool) -> None:
        if a.dtype != out.dtype:
            made = torch.mm(a, b)
            out.copy_(made) if fresh else out.add_(made)
        elif fresh:
            torch.mm(a, b, out=out)
        else:
            out.addmm_(a, b)


def _chunks_of_logits(p: LinearCrossEntropyProblem, config: str, layer: Layer) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """(start, stop, x, logits) of pieces of rows whose logits exist together, in one buffer."""
    device = layer.x.device
    size = CHUNK_GPU if device.type != "cpu" else CHUNK_BF16 if config == "bf16_products" else CHUNK
    step = min(max(FEWEST_ROWS, size // p.cols), p.rows)
    buffer = torch.empty((step, p.cols), dtype=layer.dtype, device=device)
    for start in range(0, p.rows, max(step, 1)):
        stop = min(start + step, p.rows)
        x = layer.rows(start, stop)
        yield start, stop, x, layer.logits(x, buffer[: stop - start])


def _pieces(logits: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Parts of a chunk of logits that stay in the cache, and which rows of the call they are."""
    for first, last in eager.chunks(logits.shape[0], logits.shape[1], logits.device):
        yield logits[first:last], slice(start + first, start + last)


def _opened(p: LinearCrossEntropyProblem, part: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Capped logits in the dtype of arithmetic, and a buffer to work in, which is the logits themselves where they need not be kept."""
    z = eager.capped(p.loss, part, layer.wide)
    if not p.softcap:
        return z, z
    return z, part if part.dtype == layer.wide else torch.empty_like(z)


def _write(part: torch.Tensor, dlogits: torch.Tensor) -> None:
    """Over the logits, rounded once where they are stored in 16 bits."""
    if dlogits.data_ptr() != part.data_ptr():
        part.copy_(dlogits)


def launch_fwd(
    p: LinearCrossEntropyProblem,
    config: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The loss, factors [rows, 3], the divisor of the mean, and (where `when` is forward) dx, dweight, dbias of the sum of losses."""
    layer = Layer(p, config, x, weight, bias)
    class_weight = None if class_weight is None else class_weight.to(layer.wide)
    rows = eager.read_targets(p.loss, target, class_weight, layer.wide)
    loss, factors = (torch.empty(shape, dtype=layer.wide, device=x.device) for shape in (p.rows, (p.rows, 3)))
    grads = Gradients(p, layer) if p.when == "forward" else None
    for start, stop, xs, logits in _chunks_of_logits(p, config, layer):
        for part, at in _pieces(logits, start):
            z, work = _opened(p, part, layer)
            loss[at], factors[at] = eager.row_losses(p.loss, z, rows.part(at.start, at.stop), class_weight, work)
            if grads is not None:
                capped = z if p.softcap else None
                _write(part, eager.row_gradients(p.loss, work, capped, rows.part(at.start, at.stop), factors[at], None, class_weight))
        if grads is not None:
            grads.add(start, stop, xs, logits)
    reduced, divisor = eager.reduce(p.loss, loss, rows, num_tokens)
    none = loss.new_empty(0)
    results = (none, none.clone(), none.clone()) if grads is None else (grads.dx, grads.dw, grads.db)
    return reduced.view(target.shape) if p.reduction == "none" else reduced, factors, divisor, *results


def launch_bwd(
    p: LinearCrossEntropyProblem,
    config: str,
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    factors: torch.Tensor,
    divisor: torch.Tensor | None,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dweight, dbias: those of the forward scaled, or computed anew from recomputed logits."""
    if p.when == "forward":
        return finish(p, x, dloss, divisor, dx, dweight, dbias)
    layer = Layer(p, config, x, weight, bias)
    class_weight = None if class_weight is None else class_weight.to(layer.wide)
    rows = eager.read_targets(p.loss, target, class_weight, layer.wide)
    per_row, common = row_scales(p, dloss, target, layer.wide)
    grads = Gradients(p, layer)
    for start, stop, xs, logits in _chunks_of_logits(p, config, layer):
        for part, at in _pieces(logits, start):
            z, work = _opened(p, part, layer)
            torch.sub(z, factors[at, :1], out=work).exp_()
            scale = None if per_row is None else per_row[at]
            _write(
                part,
                eager.row_gradients(p.loss, work, z if p.softcap else None, rows.part(at.start, at.stop), factors[at], scale, class_weight),
            )
        grads.add(start, stop, xs, logits)
    return finish(p, x, common, divisor, grads.dx, grads.dw, grads.db)


def row_scales(
    p: LinearCrossEntropyProblem, dloss: torch.Tensor, target: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What dlogits are multiplied with before they are rounded [rows], and what the gradients are after it [].

    The common factor is the largest finite one, so that finite scales are at most 1 in size, and a row whose own gradient is infinite or
    NaN spoils no other row's dx. Ignored rows count for nothing, whatever their gradient is.
    """
    if p.reduction != "none":
        return None, dloss
    flat = dloss.reshape(-1).to(dtype).masked_fill(target.reshape(-1) == p.ignore_index, 0.0)
    largest = flat.abs().masked_fill(~flat.isfinite(), 0.0).amax() if p.rows else flat.new_ones(())
    common = torch.where(largest == 0, 1.0, largest)
    return flat / common, common


def factor_of(scale: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
    """scale / divisor []; 0 where the divisor is 0, which means that no row is kept."""
    return scale if divisor is None else torch.where(divisor == 0, 0.0, scale / divisor)


def finish(
    p: LinearCrossEntropyProblem,
    x: torch.Tensor,
    scale: torch.Tensor,
    divisor: torch.Tensor | None,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
    db: torch.Tensor | None,
    multiply: Callable[..., torch.Tensor] = torch.mul,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients times scale / divisor, each rounded once to its input's dtype. `multiply` is called as `torch.mul` is."""
    factor = factor_of(scale, divisor)
    results = []
    for grad, name, needed in ((dx, p.x, p.need_dx), (dw, p.weight, p.need_dw), (db, p.bias or p.weight, p.need_db)):
        out = torch.empty(grad.shape if needed and grad is not None else (0,), dtype=DTYPE_OF[name], device=x.device)
        results.append(multiply(grad, factor, out=out) if needed and grad is not None else out)
    return results[0].view(x.shape) if p.need_dx else results[0], results[1], results[2]
