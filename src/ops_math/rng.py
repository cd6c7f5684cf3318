"""Random numbers that are a function of a key and of global coordinates, so that a mask repeats wherever it is computed.

Philox4x32 with 7 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011: the fewest rounds that pass
BigCrush). One call decides eight neighbours: element (row, head, col) is half-word `col % 8` of Philox at counter
(col // 8, row, head, offset) under key seed, the low half of each of the four words first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops_math import checks, settings
from ops_math.stats import counter as counter_for

ROUNDS = 7
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_CPU_CHUNK = 16384  # groups of eight worked on at a time: six buffers of 128 KiB
GROUP = 8  # elements that one Philox call decides
LEVELS = 2**16  # values of a half-word


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
            given: Any = key
            if not hasattr(given, "__index__"):  # int(1.5) and int("1") would be taken for other keys than were meant
                checks.fail("Rng", "key", "a whole number or an integer tensor []", repr(key), "Pass e.g. ops_math.Rng(0, device).")
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
        return Rng.of_state(self._moved(1, number))

    def at_row(self, first_row: int) -> Rng:
        """The same stream for a batch whose first row has this global number."""
        return Rng.of_state(self._moved(2, first_row))

    def _moved(self, place: int, by: int) -> torch.Tensor:
        """The state with one number moved, without a copy from the host."""
        state = self.state.clone()
        state[place].add_(by)
        return state


def state_for(operator: str, rng: Rng | None, device: torch.device) -> torch.Tensor:
    """The state tensor of `rng`, or one drawn from PyTorch's generator of the device: not from level 2 on, where a piece of the batch must
    find its part of the mask again."""
    if rng is None and settings.determinism_level() >= 2:
        level = settings.determinism_level()
        do = "Pass om.Rng(key, device), for a piece with at_row(first row); in a model attach an ops_nn.SeedPool."
        checks.fail(operator, "rng", f"given at determinism level {level}, where a mask may not follow the batch", "None", do)
    if rng is None:  # one launch; a random stream and a random first row are as good as zeros
        return torch.randint(-(2**62), 2**62, (3,), dtype=torch.int64, device=device)
    if not isinstance(rng, Rng):
        checks.fail(operator, "rng", "an ops_math.Rng or None", type(rng).__name__, "Make one with ops_math.Rng(seed, device).")
    if rng.state.device != device:
        checks.fail(operator, "rng", f"on {device}, as the input is", str(rng.state.device), f"Make it there: Rng(key, '{device}').")
    return rng.state


def draws(x: torch.Tensor) -> bool:
    """Whether PyTorch draws the mask of a call without an Rng: on a CPU, where a keyed mask costs twice what PyTorch's own does. Not while
    tracing, where a recomputation could draw another one, nor where dropout's implementation is forced or a level asks for a key."""
    forced = any(name == "dropout" for name, _ in settings.policy().forced)
    keyed = forced or settings.determinism_level() >= 2
    return x.device.type == "cpu" and not (keyed or torch.compiler.is_compiling() or settings.triton_interpret())


def drawn(operator: str, x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout by PyTorch, its autograd included, counted for the operator that asked."""
    counter = counter_for(operator, "dropout", "plain", "PyTorch draws the mask: no rng was given")
    counter.calls += 1
    counter.bytes += 2 * x.numel() * x.element_size()
    return F.dropout(x, p).contiguous()


def threshold(p: float) -> int:
    """A half-word at or above this [0, 2^16) keeps its element."""
    return min(round(p * LEVELS), LEVELS - 1)


def honoured(p: float) -> float:
    """The chance of dropping that a keyed mask has: the multiple of 2^-16 next to p, and never 1.

    What is kept grows by 1 / (1 - this), so that the mean stays exactly. It differs from p by at most 2^-17 (above 1 - 2^-17 by less than
    2^-16): a p below 2^-17 drops nothing.
    """
    return threshold(p) / LEVELS


def _high_low(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two 32-bit halves of a 32 x 32 bit product held in int64, without overflow."""
    low, high = (b & 0xFFFF) * a, (b >> 16) * a
    middle = (low >> 16) + (high & 0xFFFF)
    return ((high >> 16) + (middle >> 16)) & _MASK, ((middle << 16) | (low & 0xFFFF)) & _MASK


def philox(state: torch.Tensor, row: torch.Tensor, head: torch.Tensor | int, group: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words (as int64) for each broadcast element of (row, head, group); `group` is col // 8."""
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
    if state.device.type == "cpu" and not torch.compiler.is_compiling():
        rows, heads = torch.broadcast_tensors(row, torch.as_tensor(head))
        return _keep_mask_cpu(state, rows.reshape(-1), heads.reshape(-1), num_cols, p).view(*rows.shape, num_cols)
    group = torch.arange((num_cols + GROUP - 1) // GROUP, device=state.device)
    heads = head[..., None] if isinstance(head, torch.Tensor) else head
    words = torch.stack(torch.broadcast_tensors(*philox(state, row[..., None], heads, group)), -1)
    halves = torch.stack((words & (LEVELS - 1), words >> 16), -1)
    return halves.flatten(-3)[..., :num_cols] >= threshold(p)


def _keep_mask_cpu(state: torch.Tensor, row: torch.Tensor, head: torch.Tensor, num_cols: int, p: float) -> torch.Tensor:
    """`keep_mask` of flat rows in numpy, whose uint64 products wrap and whose results go where they are told: 2 ns an element.

    Round one is worked out on vectors of rows and of groups, and so are the products of round two; the rest in scratch that fits the
    cache. The low half of a product is left unmasked until it is combined, or cut off where a word is stored.
    """
    import numpy as np  # here, since importing this package must need torch alone

    half, mask, m0, m1 = (np.uint64(n) for n in (32, _MASK, _M0, _M1))
    seed, offset, first_row = state.tolist()
    keys = [(np.uint64((seed + r * _W0) & _MASK), np.uint64(((seed >> 32) + r * _W1) & _MASK)) for r in range(ROUNDS)]
    groups = np.arange((num_cols + GROUP - 1) // GROUP, dtype=np.uint64)[None, :]
    rows = ((row + first_row) & _MASK).numpy().astype(np.uint64)[:, None]
    heads = (head & _MASK).numpy().astype(np.uint64)[:, None]
    keep = np.empty((rows.shape[0], groups.shape[1] * GROUP), dtype=bool)

    by_group, by_row = groups * m0, heads * m1
    row0, group2 = (by_row >> half) ^ rows ^ keys[0][0], (by_group >> half) ^ np.uint64(offset & _MASK) ^ keys[0][1]
    row1, group3 = by_row & mask, by_group & mask
    last0, last1 = row0 * m0, group2 * m1
    high0, high1 = (last0 >> half) ^ keys[1][1], (last1 >> half) ^ keys[1][0]

    chunk = max(1, _CPU_CHUNK // max(groups.shape[1], 1))
    scratch = [np.empty((min(chunk, rows.shape[0]), groups.shape[1]), np.uint64) for _ in range(6)]
    words, least = np.empty((*scratch[0].shape, 4), "<u4"), np.uint16(threshold(p))
    for start in range(0, rows.shape[0], chunk):
        piece = slice(start, start + chunk)
        c0, c2, even0, even1, odd0, odd1 = (t[: keep[piece].shape[0]] for t in scratch)
        np.bitwise_xor(high1, row1[piece], out=c0)
        np.bitwise_xor(high0[piece], group3, out=c2)
        c1, c3 = last1, last0[piece]
        for number, (k0, k1) in enumerate(keys[2:]):
            product0, product1 = (even0, even1) if number % 2 else (odd0, odd1)
            np.multiply(c0, m0, out=product0)
            np.multiply(c2, m1, out=product1)
            for c, product, low, key in ((c0, product1, c1, k0), (c2, product0, c3, k1)):
                np.right_shift(product, half, out=c)
                np.bitwise_xor(c, low, out=c)
                np.bitwise_xor(c, key, out=c)
                np.bitwise_and(c, mask, out=c)
            c1, c3 = product1, product0
        drawn_words = words[: c0.shape[0]]
        for j, word in enumerate((c0, c1, c2, c3)):
            np.copyto(drawn_words[..., j], word, casting="unsafe")
        np.greater_equal(drawn_words.view("<u2").reshape(keep[piece].shape), least, out=keep[piece])
    return torch.from_numpy(keep)[:, :num_cols]
