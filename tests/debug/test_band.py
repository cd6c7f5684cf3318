"""A loss curve of another seed is inside the band as often as it should be, and one of another learning rate is outside."""

from __future__ import annotations

import random

import pytest
import torch

import ops_math as om
from ops_nn.debug import loss_band


def train(seed, rate=0.1, steps=30):
    """Losses of a small regression."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 1, generator=g).requires_grad_()
    truth = torch.arange(6.0)[:, None]
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 6, generator=g)
        loss = (x @ weight - x @ truth).square().mean()
        (dw,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= rate * dw
        losses.append(loss.item())
    return losses


def test_another_learning_rate_is_outside_the_band_of_seeds():
    band = loss_band(train, range(9))
    found = band.judge(train(100, rate=0.03))
    assert found.outside
    assert found.first_outside is not None
    assert str(found).startswith("outside the band: the farthest from the others of 10 runs")
    assert "a curve of another seed is the farthest one time in 10" in str(found)


def test_a_run_of_another_seed_is_called_outside_one_time_in_k_plus_one():
    draw = random.Random(5)
    trials, wrong, seeds = 400, 0, 9
    for _ in range(trials):
        runs = [[draw.gauss(0, 1) for _ in range(20)] for _ in range(seeds + 1)]
        wrong += loss_band(lambda seed: runs[seed], range(seeds)).judge(runs[-1]).outside  # noqa: B023
    assert abs(wrong / trials - 1 / (seeds + 1)) < 4 * (0.1 * 0.9 / trials) ** 0.5


def test_a_loss_that_is_no_number_is_outside():
    band = loss_band(train, range(3))
    assert band.judge([float("nan")] * 30).outside
    assert band.judge([float("nan")] * 30).first_outside == 0


def test_what_makes_no_band_is_refused_in_words():
    with pytest.raises(
        om.ArgumentError, match=r"^loss_band: seeds must be at least 3 different numbers; got \[1, 1, 2\]\. Pass range\(5\)\.$"
    ):
        loss_band(train, [1, 1, 2])
    with pytest.raises(om.ArgumentError, match=r"^loss_band: run must give as many losses for each seed; got \[0, 1, 2\]\."):
        loss_band(lambda seed: [0.0] * seed, range(3))
    with pytest.raises(om.ArgumentError, match=r"^loss_band: run must give its losses, one a step; got float\. Return a list of them"):
        loss_band(lambda seed: 1.0)
    with pytest.raises(om.ArgumentError, match=r"^loss_band: run must give finite losses; got others for seed 0\."):
        loss_band(lambda seed: [float("inf")], range(3))
    with pytest.raises(om.ArgumentError, match=r"^loss_band: run must be a function of a seed; got list\. Pass what trains"):
        loss_band([1.0, 2.0])
    with pytest.raises(om.ArgumentError, match=r"^loss_band: seeds must be at least 3 different numbers; got 5\. Pass range\(5\)\."):
        loss_band(lambda seed: [1.0], 5)
    with pytest.raises(om.ArgumentError, match=r"^Band\.judge: losses must be 30 numbers, one a step; got 3\."):
        loss_band(train, range(3)).judge([1.0, 2.0, 3.0])
