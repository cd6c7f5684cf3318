"""The levels on a GPU: kernels that Triton compiles for one row, or for a multiple of sixteen, give the bits of the others."""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from tests.determinism import ranks
from tests.determinism.calls import SAMPLES, differing, drawn, in_pieces, joined, outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="missing capability: a CUDA or ROCm device"),
]
DTYPES = (torch.bfloat16, torch.float32)
BLOCK = 64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_a_thousand_calls_give_the_same_bits(sample, dtype):
    with om.determinism(1):
        given = drawn(sample, 33, "cuda", dtype)
        first = [t for part in outcome(sample, *given, 0) for t in part]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            again = [t for part in outcome(sample, *given, 0) for t in part]
            for a, b in zip(first, again, strict=True):
                wrong += (a.view(torch.uint8) != b.view(torch.uint8)).any()
        assert int(wrong) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_a_cut_of_the_batch_changes_no_bit_of_outputs_and_input_gradients(sample, dtype):
    with om.determinism(2):
        given = drawn(sample, 33, "cuda", dtype)
        whole = outcome(sample, *given, 0)
        for cuts in ([1] * 33, [1, 32], [16, 17], [15, 2, 16]):
            parts = joined(in_pieces(sample, cuts, *given))
            assert differing(whole.outputs, parts.outputs) == [], cuts
            assert differing(whole.inputs, parts.inputs) == [], cuts


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.shared(torch.Generator()) and s.name != "rope"], ids=lambda s: s.name)
def test_token_blocks_add_up_to_the_gradients_of_the_batch(sample):
    with om.determinism(2, token_block=BLOCK):
        given = drawn(sample, 3 * BLOCK + 7, "cuda")
        parts = joined(in_pieces(sample, [BLOCK, BLOCK, BLOCK, 7], *given))
        assert differing(outcome(sample, *given, 0).shared, parts.shared) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("degree", [2, 4])
def test_shards_of_a_weight_and_of_heads_give_the_bits_of_one_rank(degree, dtype):
    g = torch.Generator().manual_seed(3)
    x, w = (torch.randn(*shape, generator=g).to("cuda", dtype) for shape in ((37, 1024), (1024, 1024)))
    q, k, v = (torch.randn(2, 256, h, 64, generator=g).to("cuda", dtype) for h in (16, 4, 4))
    with om.determinism(3):
        outputs = [om.linear(x, part, parts=(4, 4 // degree)) for part in w.chunk(degree)]
        assert torch.equal(om.linear(x, w, parts=(4, 4)), torch.cat(outputs, 1))
        shards = zip(x.chunk(degree, 1), w.chunk(degree, 1), strict=True)
        sums = [om.linear(a.contiguous(), b.contiguous(), parts=(4 // degree, 4), wide=True) for a, b in shards]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        assert torch.equal(om.linear(x, w, parts=(4, 4), wide=True), sums[0])
        ranks = [om.attention(*(t.chunk(degree, 2)[r].contiguous() for t in (q, k, v)), causal=True) for r in range(degree)]
        assert torch.equal(om.attention(q, k, v, causal=True), torch.cat(ranks, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [*ranks.BY_HEADS, *ranks.BY_ROWS, *ranks.BY_COLUMNS], ids=lambda c: c.name)
def test_ranks_that_hold_heads_rows_or_columns_give_the_bits_of_one_device(cut, dtype):
    with om.determinism(3, token_block=BLOCK):
        one, *more = [ranks.at(cut, degree, "cuda", dtype) for degree in ranks.DEGREES]
    for found in more:
        assert differing(one["outputs"], found["outputs"]) == []
        assert differing(one["gradients"], found["gradients"]) == []


def test_shards_of_a_parameter_are_stepped_to_the_bits_of_the_whole():
    with om.determinism(3):
        one, *more = [ranks.stepped(degree, "cuda") for degree in ranks.DEGREES]
    assert [differing(one, found) for found in more] == [[], []]


def test_cublas_that_was_used_before_is_said_in_words(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.randn(8, 8, device="cuda") @ torch.randn(8, 8, device="cuda")
    with pytest.warns(om.DeterminismWarning, match="CUBLAS_WORKSPACE_CONFIG is not set and CUDA has been used in this process"):
        om.determinism(1).__exit__(None, None, None)
