"""A mask is a function of the key and of global coordinates, and has the right statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ops_math.checks import ArgumentError
from ops_math.rng import Rng, honoured, keep_mask, philox, state_for, threshold


def scalar_philox(counter, key, rounds=7):
    """Philox4x32 on Python integers, from the paper's definition."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_the_words_are_philox_at_the_documented_counter():
    seed, offset, first = 0x1234_5678_9ABC_DEF0, 7, 100
    state = torch.tensor([seed, offset, first])
    words = philox(state, torch.tensor([3]), 2, torch.tensor([5]))
    expected = scalar_philox((5, 103, 2, 7), (seed & 0xFFFFFFFF, seed >> 32))
    assert [int(w) for w in words] == expected


def test_numpys_philox_of_ten_rounds_agrees_with_the_scalar_one():
    assert len(set(scalar_philox((1, 2, 3, 4), (5, 6), rounds=10))) == 4
    assert scalar_philox((0, 0, 0, 0), (0, 0), rounds=10) == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]  # known-answer test of Random123


def test_a_batch_cut_in_two_gives_the_mask_of_the_whole():
    rng = Rng(5)
    whole = keep_mask(rng.state, torch.arange(40), 0, 33, 0.3)
    parts = [keep_mask(rng.at_row(a).state, torch.arange(20), 0, 33, 0.3) for a in (0, 20)]
    assert torch.equal(whole, torch.cat(parts))


def test_another_stream_head_seed_or_row_gives_another_mask():
    def mask(rng, head=0):
        return keep_mask(rng.state, torch.arange(64), head, 64, 0.5)

    base = mask(Rng(5))
    for other in (mask(Rng(6)), mask(Rng(5).child(1)), mask(Rng(5), head=1), mask(Rng(5).at_row(64))):
        agree = (base == other).double().mean().item()
        assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(base.numel())


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_elements_are_dropped_with_probability_p(p):
    mask = keep_mask(Rng(11).state, torch.arange(500), 0, 403, p)
    n = mask.numel()
    assert abs((~mask).double().mean().item() - p) <= 5 * math.sqrt(p * (1 - p) / n)


def test_neighbouring_columns_and_rows_are_uncorrelated():
    m = keep_mask(Rng(3).state, torch.arange(512), 0, 512, 0.5).double().numpy() - 0.5
    for lag in (1, 2, 3, 4):
        for a, b in ((m[:, lag:], m[:, :-lag]), (m[lag:], m[:-lag])):
            assert abs(np.mean(a * b)) < 5 * 0.25 / math.sqrt(a.size)


def test_the_threshold_is_a_probability_of_a_half_word():
    assert threshold(0.0) == 0
    assert threshold(0.5) == 2**15
    assert threshold(1 - 2**-40) == 2**16 - 1


def test_the_chance_that_a_mask_has_is_near_the_one_asked_for_and_never_one():
    for p in (0.0, 1e-9, 2**-17, 2**-16, 0.1, 0.25, 1 / 3, 0.9, 1 - 2**-17):
        assert abs(honoured(p) - p) <= 2**-17
        assert honoured(honoured(p)) == honoured(p)
    assert honoured(0.0) == honoured(1e-9) == 0.0
    assert honoured(1 - 2**-40) == 1 - 2**-16


def test_an_element_is_the_half_word_of_the_documented_place():
    seed, offset, first, p = 77, 3, 10, 0.4
    mask = keep_mask(torch.tensor([seed, offset, first]), torch.tensor([5]), 2, 21, p)[0]
    for col in range(21):
        word = scalar_philox((col // 8, 15, 2, offset), (seed, 0))[col % 8 // 2]
        half = word >> 16 if col % 2 else word & 0xFFFF
        assert mask[col].item() == (half >= round(p * 2**16))


def test_the_halves_of_a_word_are_uniform_and_independent_of_each_other():
    state, rows = Rng(8).state, torch.arange(2048)
    words = torch.stack(philox(state, rows[:, None], 0, torch.arange(64)[None]), -1)
    low, high = ((words & 0xFFFF).double() + 0.5) / 2**16 - 0.5, ((words >> 16).double() + 0.5) / 2**16 - 0.5
    n = low.numel()
    for half in (low, high):
        assert abs(half.mean().item()) < 5 / math.sqrt(12 * n)
        assert abs(half.square().mean().item() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    assert abs((low * high).mean().item()) < 5 / 12 / math.sqrt(n)


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5])
def test_what_is_kept_grows_by_what_keeps_the_mean(p):
    kept = keep_mask(Rng(4).state, torch.arange(4096), 0, 1024, p)
    n, q = kept.numel(), honoured(p)
    assert abs(kept.double().mean().item() / (1 - q) - 1) < 5 * math.sqrt(q / (1 - q) / n)


def test_without_an_rng_the_key_comes_from_pytorchs_generator():
    torch.manual_seed(0)
    first = state_for("dropout", None, torch.device("cpu"))
    second = state_for("dropout", None, torch.device("cpu"))
    torch.manual_seed(0)
    assert torch.equal(first, state_for("dropout", None, torch.device("cpu")))
    assert not torch.equal(first, second)


def test_a_seed_in_place_of_an_rng_is_refused_in_words():
    with pytest.raises(
        ArgumentError, match=r"^dropout: rng must be an ops_math\.Rng or None; got int\. Make one with ops_math\.Rng\(seed, device\)\.$"
    ):
        state_for("dropout", 5, torch.device("cpu"))


@pytest.mark.parametrize("num_cols", [0, 1, 7, 8, 257])
def test_the_mask_worked_out_in_numpy_is_that_of_the_words(num_cols):
    row, head = torch.arange(900).view(300, 1, 3), torch.arange(2)[:, None]
    for state in (Rng(-7, first_row=2**32 - 100).child(2**32 - 1).state, Rng(2**62 + 1).state):
        words = torch.stack(torch.broadcast_tensors(*philox(state, row[..., None], head[..., None], torch.arange((num_cols + 7) // 8))), -1)
        want = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(-3)[..., :num_cols] >= threshold(0.3)
        assert torch.equal(keep_mask(state, row, head, num_cols, 0.3), want)
