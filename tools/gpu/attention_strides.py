"""Does attention take tensors whose rows lie on each other, or whose heads lie one behind the other, through tensor descriptors?

    PYTHONPATH=src:. python tools/gpu/attention_strides.py [--long]

An output gradient that is expanded along the sequence, as `out.sum(1).backward()` gives, has a stride of 0 between queries; keys and values
that are expanded have it too. Each call is held to the same call on copies, by less than a unit of bf16 of each tensor. `--long` adds a
sequence whose heads, one behind the other, span more elements than 32 bits count (17 GiB).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

import ops_math as om

BF16, UNIT = torch.bfloat16, 2.0**-8
Tensors = tuple[torch.Tensor, ...]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """A draw that repeats."""
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(BF16)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, S, H, D] in the memory of [B, H, S, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def one_row(x: torch.Tensor) -> torch.Tensor:
    """Every token is the first one, with a stride of 0."""
    return x[:, :1].expand(x.shape)


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Tensors:
    """Output and gradients."""
    with om.force(attention="triton_gpu"):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = om.attention(*leaves, causal=True)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def held(name: str, tensors: Tensors) -> bool:
    """The call as it is and the call on copies differ by less than a unit."""
    try:
        pairs = list(zip(step(*tensors), step(*(t.contiguous() for t in tensors)), strict=True))
    except (RuntimeError, ValueError, OverflowError) as error:  # what a driver, a launcher or an operator raises
        print(f"{name}: {type(error).__name__}: {error}")
        return False
    worst = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    print(f"{name}: {worst:.2g}")
    return worst < UNIT


def drawn(batch: int, tokens: int, heads: int, width: int) -> list[torch.Tensor]:
    """q, k, v and an output gradient."""
    return [normal(batch, tokens, heads, width, seed=i) for i in range(4)]


KINDS: dict[str, Callable[..., Tensors]] = {
    "the output gradient expanded": lambda q, k, v, dout: (q, k, v, one_row(dout)),
    "keys and values expanded": lambda q, k, v, dout: (q, one_row(k), one_row(v), dout),
    "heads first": lambda *tensors: tuple(heads_first(t) for t in tensors),
}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true")
    long = parser.parse_args().long
    held_up = [held(f"{batch} sequences, {name}", make(*drawn(batch, 512, 4, 64))) for batch in (1, 2) for name, make in KINDS.items()]
    if long:
        held_up.append(held("more than 32 bits", KINDS["heads first"](*drawn(1, 132_608, 128, 128))))
    sys.exit(f"{held_up.count(False)} of {len(held_up)} differ" if not all(held_up) else 0)


if __name__ == "__main__":
    main()
