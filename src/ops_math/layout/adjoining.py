"""Tensors that lie one after the other in one storage are one tensor: several weights, one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ops_math import checks, features


def adjoining(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one along their first dimension, without a copy; None where they do not lie one after the other.

    Nothing is remembered: addresses, strides and the storage are looked at each time, since `.to`, `deepcopy`, sharding and
    `load_state_dict(assign=True)` move parameters without notice.

    Args:
        tensors: [N_i, ...], at least one.

    Returns:
        [sum of N_i, ...], detached, sharing memory with all of them.
    """
    first = tensors[0]
    if torch.compiler.is_compiling() or first.is_meta or features.transform(tensors):  # no addresses there
        return None
    shape, rows, place = first.shape[1:], 0, first.data_ptr()
    for t in tensors:
        if t.data_ptr() != place or t.dtype != first.dtype or t.shape[1:] != shape or not t.is_contiguous():
            return None
        place += t.numel() * t.element_size()
        rows += t.shape[0]
    if len(tensors) > 1 and tensors[-1].untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return None
    return first.detach().as_strided((rows, *shape), first.stride(), first.storage_offset())


def lay_together(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Move parameters into one new storage, one after the other; each stays the same object, with the same values and gradient.

    Args:
        parameters: [N_i, ...] of one dtype and device, the same behind the first dimension.

    Returns:
        the new buffer [sum of N_i, ...].

    Raises:
        ArgumentError: where they differ in dtype, device or shape behind the first dimension.
    """
    first = parameters[0]
    for p in parameters:
        if (p.dtype, p.device, p.shape[1:]) != (first.dtype, first.device, first.shape[1:]):
            needs = f"{first.dtype} on {first.device} with rows of {tuple(first.shape[1:])}"
            checks.fail("lay_together", "parameters", needs, f"{p.dtype} on {p.device} with {tuple(p.shape[1:])}", "Pack what is alike.")
    with torch.no_grad():
        buffer = torch.cat([p.detach() for p in parameters])
        for p, part in zip(parameters, buffer.split([p.shape[0] for p in parameters]), strict=True):
            p.data = part
    return buffer
