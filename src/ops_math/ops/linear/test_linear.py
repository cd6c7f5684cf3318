"""What is special to the linear layer: its bits at levels 2 and 3."""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from ops_math.checks import ArgumentError


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(x, weight, bias, dy, **options):
    """y, dx, dweight, dbias."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = om.linear(*leaves, **options)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in leaves)]


def test_a_row_has_the_same_bits_in_any_company():
    x, weight, bias, dy = normal(23, 130), normal(70, 130, seed=1), normal(70, seed=2), normal(23, 70, seed=3)
    with om.determinism(2):
        whole = run(x, weight, bias, dy)
        for first, stop in ((0, 1), (5, 23), (22, 23)):
            part = run(x[first:stop], weight, bias, dy[first:stop])
            assert torch.equal(part[0], whole[0][first:stop])
            assert torch.equal(part[1], whole[1][first:stop])


def test_token_blocks_add_up_to_the_gradient_of_the_batch():
    x, weight, bias, dy = normal(40, 33), normal(20, 33, seed=1), normal(20, seed=2), normal(40, 20, seed=3)
    with om.determinism(2, token_block=16):
        whole = run(x, weight, bias, dy)
        parts = [run(x[a:b], weight, bias, dy[a:b]) for a, b in ((0, 16), (16, 32), (32, 40))]
    for place in (2, 3):
        assert torch.equal(whole[place], parts[0][place] + parts[1][place] + parts[2][place])


def test_the_vendors_product_does_depend_on_the_rows_so_the_tests_can_fail():
    x, weight, bias, dy = normal(23, 1301), normal(70, 1301, seed=1), normal(70, seed=2), normal(23, 70, seed=3)
    whole = run(x, weight, bias, dy)
    parts = [run(x[m : m + 1], weight, bias, dy[m : m + 1])[0] for m in range(23)]
    assert not torch.equal(whole[0], torch.cat(parts))


@pytest.mark.parametrize("degree", [2, 4])
def test_columns_of_a_weight_on_several_ranks_give_the_bits_of_one(degree):
    x, weight, bias, dy = normal(5, 96), normal(256, 96, seed=1), normal(256, seed=2), normal(5, 256, seed=3)
    with om.determinism(3):
        one = run(x, weight, bias, dy, parts=(4, 4))
        ranks = [
            run(x, w, b, g, parts=(4, 4 // degree))
            for w, b, g in zip(weight.chunk(degree), bias.chunk(degree), dy.chunk(degree, 1), strict=True)
        ]
    assert torch.equal(one[0], torch.cat([r[0] for r in ranks], 1))
    assert torch.equal(one[1], in_pairs([r[1] for r in ranks]))
    assert torch.equal(one[2], torch.cat([r[2] for r in ranks]))
    assert torch.equal(one[3], torch.cat([r[3] for r in ranks]))


@pytest.mark.parametrize("degree", [2, 4])
def test_rows_of_inputs_on_several_ranks_give_the_bits_of_one(degree):
    x, weight, dy = normal(5, 256), normal(96, 256, seed=1), normal(5, 96, seed=3)

    def narrow(x, weight, parts):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = om.linear(*leaves, parts=parts, wide=True)
        y.backward(dy)
        return [y.detach(), *(t.grad for t in leaves)]

    with om.determinism(3):
        one = narrow(x, weight, (4, 4))
        ranks = [narrow(a, w, (4 // degree, 4)) for a, w in zip(x.chunk(degree, 1), weight.chunk(degree, 1), strict=True)]
    assert torch.equal(one[0], in_pairs([r[0] for r in ranks]))
    assert torch.equal(one[1], torch.cat([r[1] for r in ranks], 1))
    assert torch.equal(one[2], torch.cat([r[2] for r in ranks], 1))


def in_pairs(parts):
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def test_without_parts_ranks_give_other_bits_so_the_tests_can_fail():
    x, weight = normal(5, 1024), normal(64, 1024, seed=1)
    with om.determinism(3):
        one = om.linear(x, weight)
        halves = [om.linear(a, w, wide=True) for a, w in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
    assert not torch.equal(one, halves[0] + halves[1])


def test_what_does_not_fit_is_refused_in_words():
    x, w = torch.zeros(3, 6), torch.zeros(4, 6)
    with pytest.raises(ArgumentError, match=r"^linear: parts\[0\] must be a divisor of 6; got 4\. Pass 1, or pad the weight\.$"):
        om.linear(x, w, parts=(4, 1))
    with pytest.raises(ArgumentError, match=r"^linear: parts\[1\] must be one of 1, 2, 4, 8; got 3\. Pick one of these\.$"):
        om.linear(x, w, parts=(1, 3))
    with pytest.raises(
        ArgumentError, match=r"^linear: weight must be of shape \[4, 6\] \(one column for each input of x\); got shape \[4, 5\]"
    ):
        om.linear(x, torch.zeros(4, 5))
    with pytest.raises(ArgumentError, match=r"^linear: bias must be of shape \[4\] \(one number for each output\); got shape \[6\]"):
        om.linear(x, w, torch.zeros(6))


@pytest.mark.parametrize("strides", [(2**24 - 1, 1), (1, 2**24 - 1), (2**24 - 1, 2**24 - 1), (2**23, 2**23 + 1)])
def test_the_places_of_a_tile_are_counted_in_32_bits_whatever_both_strides_are(strides, monkeypatch):
    pytest.importorskip("triton", reason="missing capability: Triton")
    from ops_math import catalog
    from ops_math.ops.linear import triton_gpu

    seen = []
    monkeypatch.setattr(triton_gpu, "launch", lambda kernel, grid, *args, **constants: seen.append(args[:2]))
    a, b = torch.empty_strided((128, 32), strides, dtype=torch.bfloat16, device="meta"), normal(32, 128).bfloat16().to("meta")
    p = catalog.operators()["linear"].phases["fwd"].problem_of(a, b.t(), None, a.dtype, a.dtype, 1, 1)
    triton_gpu._multiply(p, triton_gpu.Config(128, 128, 32, 8, 3), a, b, None, a.new_empty(128, 128))
    ((left, right),) = seen
    for rows, cols, t in ((128, 32, left), (32, 128, right)):
        assert (rows - 1) * t.stride(0) + (cols - 1) * t.stride(1) < 2**31
    assert (left is a) == (sum(strides) <= 2**24)
