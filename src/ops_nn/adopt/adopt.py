"""adopt(model): the public function, and the object that reports and reverts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.adopt import bert, chain, encoder, hugging_face, llama
from ops_nn.adopt.swap import Swap, class_name

_FAMILIES = (llama.swaps, bert.swaps, encoder.swaps, hugging_face.swaps)


class Row(NamedTuple):
    """One module: `where` is its path in the model, `what` was put in or is read, `fused` whether it is, `reason` why not."""

    where: str
    what: str
    fused: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.where or 'the model'}: {self.what}" + ("" if self.fused else f" runs as it is: {self.reason}")


class Adoption:
    """What `adopt` did to a model.

    Attributes:
        model: the model, changed in place.
        report: a `Row` for each module that was looked at.
    """

    def __init__(self, model: nn.Module, swaps: list[Swap], report: tuple[Row, ...], packing: om.Packing | None = None) -> None:
        self.model, self.report = model, report
        self._swaps, self._packing = swaps, packing

    def revert(self) -> nn.Module:
        """Take everything out again; the model is bit for bit what it was. A second call does nothing."""
        for swap in self._swaps:
            swap.take()
        if self._packing is not None:
            self._packing.unpack()
        self._swaps, self._packing = [], None
        return self.model

    def check(self, loss: Callable[[nn.Module], Tensor], *, tolerance: float = 2.0, on_error: str = "raise") -> Any:
        """Run one step both ways, every fused call compared with plain PyTorch and float64, forward and backward.

        Gradients that the parameters hold, and PyTorch's generators, are as before afterwards.

        Args:
            loss: `loss(model)` gives a scalar, e.g. `lambda m: m(ids, labels).loss`.
            tolerance, on_error: as `om.debug` takes them.

        Returns:
            the report of `om.debug`.

        Raises:
            BudgetError: where a result or gradient is outside its error budget, with `on_error="raise"`.
        """
        kept = [(p, p.grad) for p in self.model.parameters()]
        devices = {p.device for p, _ in kept if p.device.type == "cuda"}
        try:
            for p, _ in kept:
                p.grad = None
            with torch.random.fork_rng(devices=list(devices)), om.debug(tolerance=tolerance, on_error=on_error) as debugger:
                loss(self.model).backward()
        finally:
            for p, grad in kept:
                p.grad = grad
        return debugger.report()

    def __enter__(self) -> Adoption:
        return self

    def __exit__(self, *error: object) -> None:
        self.revert()

    def __str__(self) -> str:
        return "\n".join(str(row) for row in self.report)


def _swap_for(path: str, module: nn.Module) -> Swap | None:
    for family in _FAMILIES:
        found = family(path, module)
        if found is not None:
            return found
    return None


def _why_not(module: nn.Module) -> str:
    """Why a module whose class is known must not be changed, or nothing."""
    if chain.adopted(module):
        return "it is adopted already"
    if "forward" in module.__dict__ and not chain.bare(module):
        return "a forward of its own is set on the instance"
    forward: Any = type(module).forward
    if f"{forward.__module__}.{forward.__qualname__}" != f"{class_name(module)}.forward":
        return f"its forward was replaced by {forward.__module__}.{forward.__qualname__}"
    return ""


def _part_rows(swap: Swap) -> list[Row]:
    rows = []
    for name, module in swap.parts.items():
        found = om.part_of(module)
        rows.append(Row(f"{swap.path}.{name}".strip("."), found.kind or type(module).__name__, found.fused, found.reason))
    return rows


def adopt(model: nn.Module, *, pack: bool = False) -> Adoption:
    """Put the operators into a model, in place.

    Forwards of layers become the two lines, residual sums are fused with the norms that follow, and the loss of the head is computed
    without whole logits. Parameters, state dict, hooks and signatures stay as they are. While training with labels the logits are not
    returned.

    Args:
        model: it, or a part of it, is our Llama or BERT baseline, a Hugging Face Llama, Qwen2, Mistral or BERT, or a
            torch.nn.TransformerEncoder; what is not known is left alone and reported.
        pack: also lay weights that share an input together in memory (`om.pack_weights`), so that they are one product. Off by default:
            a product of another shape may round another bit, and torch.compile and a deep copy run the products apart. Ask for it before
            anything that flattens parameters into a buffer of its own.

    Returns:
        an `Adoption` with `.report`, `.model`, `.check(loss)` and `.revert()`; a context manager too.

    Raises:
        ArgumentError: for something that is not a module.
    """
    if not isinstance(model, nn.Module):
        raise om.ArgumentError(f"adopt: model must be a torch.nn.Module; got {type(model).__name__}. Pass the model itself.")
    swaps: list[Swap] = []
    rows: list[Row] = []
    for path, module in model.named_modules():
        swap = _swap_for(path, module)
        if swap is None:
            continue
        why = _why_not(module) or swap.why
        rows.append(Row(path, swap.what, not why, why))
        if not why:
            swaps.append(swap)
            rows.extend(_part_rows(swap))
    for swap in swaps:
        swap.put()
    if not swaps and not rows:
        rows.append(
            Row(
                "",
                type(model).__name__,
                False,
                "it holds no layer that is known; use om.residual_attention and om.residual_mlp in its forward",
            )
        )
    packing = om.pack_weights(model) if pack and swaps else None
    for group in () if packing is None else packing.rows:
        rows.append(Row(group.path, f"{', '.join(group.layers)} as one product", group.packed, group.reason))
    return Adoption(model, swaps, tuple(rows), packing)
