"""Random numbers that are a function of a key and of global coordinates, so that a mask repeats wherever it is computed.

Philox4x32 with 7 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011: the fewest rounds that pass
BigCrush). The word for element (row, head, col) is word `col % 4` of Philox at counter (col // 4, row, head, offset) under key seed.
"""

from __future__ import annotations

import torch

from ops_math import checks

ROUNDS = 7
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


class Rng:
    """A stream of random masks on one device.

    Holds `state`, an int64 tensor [3] on the device: (seed, offset, first row). The same Rng gives the same mask, always; make a new
    one for each use with `child`, or pass none to draw a key from PyTorch's generator.

    Args:
        key: a seed, or an int64 tensor of one element on the device (no synchronisation).
        device: where masks will be needed.
        first_row: the global number of the first row of the batch, for a batch that is cut into pieces.
    """

    __slots__ = ("state",)

    def __init__(self, key: int | torch.Tensor, device: torch.device | str = "cpu", *, first_row: int = 0) -> None:
        if isinstance(key, torch.Tensor):
            checks.integer("Rng", "key", key)
            rest = torch.tensor([0, first_row], dtype=torch.int64, device=key.device)
            self.state = torch.cat([key.reshape(1).to(torch.int64), rest])
        else:
            signed = (int(key) + 2**63) % 2**64 - 2**63
            self.state = torch.tensor([signed, 0, first_row], dtype=torch.int64, device=device)

    @staticmethod
    def of_state(state: torch.Tensor) -> Rng:
        """An Rng around an existing state tensor [3]."""
        made = Rng.__new__(Rng)
        made.state = state
        return made

    def child(self, number: int) -> Rng:
        """Another stream of the same seed: streams with different numbers (below 2^32) are independent."""
        return Rng.of_state(self.state + torch.tensor([0, number, 0], dtype=torch.int64, device=self.state.device))

    def at_row(self, first_row: int) -> Rng:
        """The same stream for a batch whose first row has this global number."""
        return Rng.of_state(self.state + torch.tensor([0, 0, first_row], dtype=torch.int64, device=self.state.device))


def state_for(operator: str, rng: Rng | None, device: torch.device) -> torch.Tensor:
    """The state tensor of `rng`, or one drawn from PyTorch's generator of the device."""
    if rng is None:  # one launch; a random stream and a random first row are as good as zeros
        return torch.randint(-(2**62), 2**62, (3,), dtype=torch.int64, device=device)
    if not isinstance(rng, Rng):
        checks.fail(operator, "rng", "an ops_math.Rng or None", type(rng).__name__, "Make one with ops_math.Rng(seed, device).")
    if rng.state.device != device:
        checks.fail(operator, "rng", f"on {device}, as the input is", str(rng.state.device), f"Make it there: Rng(key, '{device}').")
    return rng.state


def threshold(p: float) -> int:
    """A word at or above this [0, 2^32) keeps its element: the chance of dropping is p to within 2^-33."""
    return min(round(p * 2**32), 2**32 - 1)


def _high_low(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two 32-bit halves of a 32 x 32 bit product held in int64, without overflow."""
    low, high = (b & 0xFFFF) * a, (b >> 16) * a
    middle = (low >> 16) + (high & 0xFFFF)
    return ((high >> 16) + (middle >> 16)) & _MASK, ((middle << 16) | (low & 0xFFFF)) & _MASK


def philox(state: torch.Tensor, row: torch.Tensor, head: torch.Tensor | int, group: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words (as int64) for each broadcast element of (row, head, group); `group` is col // 4."""
    seed, offset = state[0], state[1]
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1 = group & _MASK, (row + state[2]) & _MASK
    c2 = torch.as_tensor(head, dtype=torch.int64, device=state.device) & _MASK
    c3 = offset & _MASK
    for _ in range(ROUNDS):
        h0, l0 = _high_low(_M0, c0)
        h1, l1 = _high_low(_M1, c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def keep_mask(state: torch.Tensor, row: torch.Tensor, head: torch.Tensor | int, num_cols: int, p: float) -> torch.Tensor:
    """The boolean mask of elements to keep.

    Args:
        state: int64 [3].
        row: int64, of any shape, the local row numbers (the state's first row is added).
        head: int64 that broadcasts with `row`, or 0 where there are no heads.
        num_cols: length of the last dimension of the result.
        p: chance of dropping.

    Returns:
        bool of shape [*broadcast(row, head), num_cols].
    """
    group = torch.arange((num_cols + 3) // 4, device=state.device)
    heads = head[..., None] if isinstance(head, torch.Tensor) else head
    words = torch.stack(torch.broadcast_tensors(*philox(state, row[..., None], heads, group)), -1)
    return words.flatten(-2)[..., :num_cols] >= threshold(p)
