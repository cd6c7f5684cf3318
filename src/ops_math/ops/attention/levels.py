"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from typing import Any

from ops_math.ops.attention.problem import AttentionProblem
from ops_math.schedule.levels import Levels
from ops_math.spec import Offer

ATOMICS = "its kernel adds up the gradient of queries in no fixed order, or may"
TOGETHER = "heads and batch rows are multiplied together, as many as fit the cache"
PACKED_MASK = "the mask of packed documents is drawn by the token's place in the packing"
HEAD_MASK = "a mask is drawn by the number of the head on its own rank"


def offers(p: AttentionProblem, implementation: str, config: Any, phase: str) -> Offer:
    """PyTorch's own repeat forward and on a CPU. In ours a sequence and a head see only themselves, but for the mask's numbers."""
    if implementation == "vendor":
        return Offer(1, TOGETHER) if phase == "fwd" or config in ("flash_cpu", "flash_cpu_wide") else Offer(0, ATOMICS)
    if implementation == "eager" and config != "apart":
        return Offer(1, TOGETHER)
    if p.dropout_p:
        return Offer(1, PACKED_MASK) if p.documents >= 0 else Offer(2, HEAD_MASK)
    return Offer(3)


class _AttentionLevels(Levels):
    """Packed documents are chosen for as one of a token block: neither their number nor that of their tokens may matter."""

    def canonical(self, problem: Any, token_block: int) -> Any:
        """One sequence of its own length, or one document."""
        if problem.documents < 0:
            return problem._replace(batch=1)
        return problem._replace(q_len=token_block, k_len=token_block, documents=1, max_q=0, max_k=0)


LEVELS = _AttentionLevels(offers, "1: on a GPU never cuDNN's or Flash's backward; 2: none more on a GPU; on a CPU a call a head")
