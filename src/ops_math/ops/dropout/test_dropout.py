"""What is special to dropout: where its mask comes from."""

from __future__ import annotations

import pytest
import torch

import ops_math as om


def test_one_rng_gives_one_mask_and_another_stream_another() -> None:
    x, rng = torch.ones(64, 256), om.Rng(3)
    assert torch.equal(om.dropout(x, 0.5, rng=rng), om.dropout(x, 0.5, rng=rng))
    assert not torch.equal(om.dropout(x, 0.5, rng=rng), om.dropout(x, 0.5, rng=rng.child(1)))


@pytest.mark.parametrize("cut", [1, 13, 63])
def test_a_batch_cut_in_two_drops_what_the_whole_batch_drops(cut: int) -> None:
    x, rng = torch.randn(64, 100), om.Rng(3)
    whole = om.dropout(x, 0.3, rng=rng)
    parts = om.dropout(x[:cut], 0.3, rng=rng), om.dropout(x[cut:], 0.3, rng=rng.at_row(cut))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(om.dropout(x[cut:], 0.3, rng=om.Rng(3, first_row=cut)), parts[1])


def test_the_backward_draws_the_mask_of_the_forward() -> None:
    x = torch.ones(64, 256, requires_grad=True)
    y = om.dropout(x, 0.4)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, y)


def test_without_an_rng_the_key_comes_from_the_generator_of_pytorch() -> None:
    x = torch.ones(64, 256)
    torch.manual_seed(5)
    first, second = om.dropout(x, 0.5), om.dropout(x, 0.5)
    torch.manual_seed(5)
    assert torch.equal(om.dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_the_share_of_dropped_elements_is_p_and_neighbours_are_independent() -> None:
    kept = om.dropout(torch.ones(512, 512), 0.1, rng=om.Rng(1)) > 0
    n = kept.numel()
    assert abs(kept.double().mean().item() - 0.9) < 5 * (0.09 / n) ** 0.5
    for shifted in (kept.roll(1, 0), kept.roll(1, 1), kept.roll(4, 1)):
        both = (kept & shifted).double().mean().item()
        assert abs(both - 0.81) < 5 * (0.81 * 0.19 / n) ** 0.5


def test_a_probability_of_zero_returns_the_input_itself() -> None:
    x = torch.randn(3, 4)
    assert om.dropout(x, 0.0) is x


def test_switched_off_it_drops_the_same_elements() -> None:
    x, rng = torch.randn(31, 65), om.Rng(9)
    with om.enabled(False):
        plain = om.dropout(x, 0.25, rng=rng)
    torch.testing.assert_close(om.dropout(x, 0.25, rng=rng), plain)


def test_a_dropped_infinity_or_nan_becomes_zero() -> None:
    x = torch.full((8, 64), float("inf"))
    y = om.dropout(x, 0.5, rng=om.Rng(1))
    assert set(y.unique().tolist()) == {0.0, float("inf")}


def test_bad_arguments_are_refused_in_words() -> None:
    with pytest.raises(om.ArgumentError) as error:
        om.dropout(torch.ones(3), 1.0)
    assert (
        str(error.value)
        == "dropout: p must be at least 0 and below 1; got 1.0. Use 0 for no dropout; a probability of 1 would drop everything."
    )
    with pytest.raises(om.ArgumentError) as error:
        om.dropout(torch.ones(3, dtype=torch.int64), 0.5)
    assert str(error.value).startswith("dropout: x must be floating point (fp32, bf16, fp16 or fp64); got int64.")
    with pytest.raises(om.ArgumentError) as error:
        om.dropout(torch.ones(3), 0.5, rng=7)
    assert str(error.value).startswith("dropout: rng must be an ops_math.Rng or None; got int.")
