"""Who runs a whole step: a model as plain PyTorch, compiled, with Liger's operators or with ours, and with what of ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ops_math import catalog, checks
from ops_math.cli.bench import liger, workloads
from ops_math.graphs import graphed_step
from ops_math.recompute import recompute_norms
from ops_math.repeatable import determinism
from ops_math.settings import force
from ops_nn.models import build

PLAIN, COMPILE, LIGER, OURS = "plain", "compile", "liger", "ops"
# packed: weights that share an input laid together; graphed: the whole step replayed as one CUDA graph; adamw: ops_nn.optim.AdamW;
# lean: outputs of norms made again in the backward; inductor: operators in their compiled form where they have one (on a CPU), as a
# calibration would choose it; level1, level2: under `ops_math.determinism` at that level
PACKED, GRAPHED, ADAMW, LEAN, INDUCTOR = "packed", "graphed", "adamw", "lean", "inductor"
BASES, EXTRAS = (PLAIN, COMPILE, LIGER, OURS), (PACKED, GRAPHED, ADAMW, LEAN, INDUCTOR)
LEVELS = ("level1", "level2")
WORK = (workloads.DOCUMENTS, workloads.PADDED, workloads.TRIMMED)
HOW = (
    f"words joined by +: one of {', '.join(BASES)} (left out: ops), with {', '.join(EXTRAS)}, "
    f"at one of {', '.join(LEVELS)}, on one of {', '.join(WORK)}"
)


class Setup(NamedTuple):
    """Batch [sequences], length [tokens], dtype of the parameters, and whether the forward runs under bf16 autocast."""

    batch: int
    seq: int
    dtype: torch.dtype
    autocast: bool


class Variant(NamedTuple):
    """What a variant's name says: whose operators, what of ours besides, which optimizer, what is kept, in which form, on what work, and
    how deterministic."""

    base: str
    pack: bool
    graph: bool
    adamw: bool
    lean: bool
    inductor: bool
    work: str
    level: int


def variant_of(name: str) -> Variant:
    """`packed+graphed` in parts.

    Raises: ArgumentError for words that mean nothing, or not together.
    """
    words = name.split("+")
    bases, work, levels = ([w for w in words if w in group] for group in (BASES, WORK, LEVELS))
    known = all(word in (*BASES, *EXTRAS, *LEVELS, *WORK) for word in words)
    if not known or len(set(words)) < len(words) or max(len(bases), len(work), len(levels)) > 1:
        checks.fail("bench step", "a variant", HOW, repr(name), "Write it like packed+graphed.")
    base = bases[0] if bases else OURS
    for word in (PACKED, LEAN, INDUCTOR):
        if word in words and base != OURS:
            checks.fail("bench step", word, "used with our operators", repr(name), "Leave one of them out.")
    if base == LIGER and workloads.DOCUMENTS in words:
        checks.fail("bench step", "documents", "used without liger, whose attention is PyTorch's", repr(name), "Leave one of them out.")
    pack, graph, adamw, lean, inductor = (word in words for word in EXTRAS)
    level = LEVELS.index(levels[0]) + 1 if levels else 0
    return Variant(base, pack, graph, adamw, lean, inductor, work[0] if work else workloads.FIXED, level)


def compiled_operators() -> dict[str, str]:
    """The operators that have a compiled form on a CPU, as `force` takes them."""
    return {name: INDUCTOR for name, one in catalog.operators().items() if any(i.name == INDUCTOR for i in one.implementations())}


class Runner:
    """One model with its optimizer, and a step.

    Attributes:
        variant: its name.
        tokens: that a step learns from and that are not padding.
    """

    def __init__(
        self, name: str, variant: str, batch: int, seq: int, dtype: torch.dtype, autocast: bool, device: str, seed: int = 0
    ) -> None:
        self.variant, self.device, self.autocast = variant, device, autocast
        self.kind = kind = variant_of(variant)
        self.model = build(name, seed=seed, device=device, dtype=dtype).train()
        if kind.base == OURS:
            from ops_nn.adopt import adopt  # plain runs must not need it

            self.adopted = adopt(self.model, pack=kind.pack)
        elif kind.base == LIGER:
            liger.put_in(self.model)
        self.call: Callable[..., Any] = torch.compile(self.model) if kind.base == COMPILE else self.model
        self.optimizer = self._optimizer(kind.adamw)
        self.inputs, self.tokens = workloads.workload(kind.work, name, batch, seq, device, seed)
        self.graphed = graphed_step(self.train, optimizer=self.optimizer) if kind.graph else None

    def _optimizer(self, ours: bool) -> torch.optim.Optimizer:
        if not ours:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        from ops_nn.optim import AdamW

        return AdamW(self.model.parameters(), lr=1e-4)

    def loss(self) -> torch.Tensor:
        """The loss of one forward."""
        lean = recompute_norms() if self.kind.lean else nullcontext()
        with lean, torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.autocast):
            return self.call(**self.inputs).loss

    def step(self) -> torch.Tensor:
        """Forward, backward, optimizer, as the variant does it."""
        return self.train() if self.graphed is None else self.graphed()

    def train(self) -> torch.Tensor:
        """Forward, backward, optimizer."""
        compiled = force(**compiled_operators()) if self.kind.inductor else nullcontext()
        with determinism(self.kind.level) if self.kind.level else nullcontext(), compiled:
            loss = self.loss()
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss
