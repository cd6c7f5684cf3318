"""The fingerprint as one reads it, in Python's integers: the definition that both implementations are held to, bit for bit."""

from __future__ import annotations

import torch

from ops_math.ops.figures.problem import CHUNK_BYTES, LENGTH_FACTORS, WIDTHS, chunk_factor, factors, signed


def fingerprint(data: bytes) -> tuple[int, int]:
    """Both halves, as int64, of a tensor's bytes."""
    halves = [len(data) * factor for factor in LENGTH_FACTORS]
    for chunk, start in enumerate(range(0, len(data), CHUNK_BYTES)):
        columns = [0] * sum(WIDTHS)
        piece = data[start : start + CHUNK_BYTES]
        for n in range(0, len(piece), 8):
            word = int.from_bytes(piece[n : n + 8], "little")
            for first, width in zip((0, WIDTHS[0]), WIDTHS, strict=True):
                columns[first + n // 8 % width] += word
        for half, (whole, high) in enumerate(factors(torch.device("cpu")).tolist()):
            sums = [signed(column) for column in columns]
            total = sum(x * f + (x >> 32) * g for x, f, g in zip(sums, whole, high, strict=True))
            halves[half] += total * chunk_factor(chunk, half)
    return signed(halves[0]), signed(halves[1])
