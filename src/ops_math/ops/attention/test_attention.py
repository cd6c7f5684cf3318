from __future__ import annotations

import math
import re

import pytest
import torch

import ops_math as om
from ops_math import backends
from ops_math.ops.attention import eager, reference, vendor
from ops_math.ops.attention.problem import Rule, pairs, problem_of

NOTHING = (None,) * 5


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [draw(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


@pytest.fixture(params=["eager", "vendor"])
def implementation(request):
    with om.force(attention=request.param):
        yield request.param


Q, K = draw(2, 5, 4, 8), draw(2, 7, 2, 8)
ENDS = torch.tensor([0, 3, 5])
REFUSALS = [
    ((Q, K, K[:, :6]), {},
     "attention: v must be of shape [2, 7, 2, 8], as k is; got shape [2, 6, 2, 8]. Expand it first if you mean broadcasting."),
    ((Q, K[..., :4], K[..., :4]), {},
     "attention: k must be of shape [2, 7, 2, 8] (batch and head width of q); got shape [2, 7, 2, 4]. Check that both come "
     "from the same layer."),
    ((Q, K.bfloat16(), K), {}, "attention: k must be fp32, as q is; got bf16. Convert one: k.to(q.dtype)."),
    ((Q[:, :, :3], K, K), {},
     "attention: q must be of a number of heads that is a multiple of the 2 key heads; got 3 heads. Each key head serves "
     "the same number of query heads."),
    ((Q, K, K), {"causal": "bottom"}, "attention: causal must be one of False, True, 'top_left'; got 'bottom'. Pick one of these."),
    ((Q, K, K), {"window": (3, -2)},
     "attention: window must be a pair (left, right) of whole numbers from 0 on, or -1 for no bound; got (3, -2). Pass e.g. "
     "(255, 0)."),
    ((Q, K, K), {"scale": 0.0}, "attention: scale must be above 0; got 0.0. Pass a positive scale."),
    ((Q, K, K), {"mask": torch.zeros(3, 5, 7)},
     "attention: mask must be broadcastable to [B, H, Sq, Sk] = [2, 4, 5, 7]; got shape [3, 5, 7]. Give it size 1 where it "
     "is the same for all."),
    ((Q, K, K), {"key_padding_mask": torch.ones(2, 7)},
     "attention: key_padding_mask must be a bool tensor (True where a key may be seen); got fp32. Convert it: "
     "key_padding_mask.bool()."),
    ((Q, K, K), {"key_padding_mask": torch.ones(2, 5, dtype=torch.bool)},
     "attention: key_padding_mask must be of shape [2, 7] (batch and number of keys; True where a key may be seen); got "
     "shape [2, 5]. Check that both come from the same layer."),
    ((Q, K, K), {"cu_seqlens_k": ENDS},
     "attention: cu_seqlens_k must be given with cu_seqlens_q only; got a tensor alone. Pass cu_seqlens_q too."),
    ((Q, K, K), {"cu_seqlens_q": ENDS},
     "attention: q must be of 3 dimensions [T, H, D] (packed documents); got shape [2, 5, 4, 8]. Reshape q to [T, H, D] "
     "(packed documents)."),
    ((Q[0], K[0], K[0]), {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS[:2]},
     "attention: cu_seqlens_k must be of length 3, as cu_seqlens_q is; got length 2. Both list the same documents."),
    ((Q[0], K[0], K[0]), {"cu_seqlens_q": ENDS, "mask": torch.zeros(5, 7)},
     "attention: mask must be None with cu_seqlens; got a tensor. Packed documents have no padding; leave it out, or pass "
     "[B, S, H, D] tensors."),
    ((Q, K, K), {"dropout_p": 1.0},
     "attention: dropout_p must be at least 0 and below 1; got 1.0. Use 0 for no dropout; a probability of 1 would drop "
     "everything."),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "options", "sentence"), REFUSALS)
def test_what_does_not_fit_is_refused_in_words(tensors, options, sentence):
    with pytest.raises(om.ArgumentError, match=re.escape(sentence) + "$"):
        om.attention(*tensors, **options)


def test_a_mask_that_wants_a_gradient_is_refused():
    with pytest.raises(om.UnsupportedError, match="an additive mask gets no gradient here, and this one requires one"):
        om.attention(Q, K, K, mask=torch.zeros(5, 7, requires_grad=True))


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ([1, 3, 5], "cu_seqlens_q must be 0 at position 0; got 1."),
        ([0, 4, 3, 5], "cu_seqlens_q must be never falling; got 4 then 3 at position 2."),
        ([0, 3, 4], "cu_seqlens_q must be 5 at the end, the number of tokens; got 4."),
    ],
)
def test_checked_mode_names_the_position_of_a_wrong_document_end(ends, sentence):
    q = draw(5, 2, 8)
    with om.checked(), pytest.raises(om.ArgumentError, match=re.escape(sentence)):
        om.attention(q, q, q, cu_seqlens_q=torch.tensor(ends))


def test_a_projection_whose_width_does_not_divide_is_refused():
    with pytest.raises(om.ArgumentError, match=re.escape("a multiple of num_heads + 2 num_kv_heads = 6; got width 20")):
        om.attention_qkv(draw(1, 3, 20), num_heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_key_give_zero_minus_infinity_and_no_gradient(dtype):
    q, k, v = leaves((2, 6, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8), dtype=dtype)
    keep = torch.tensor([[True, True, False, False], [False] * 4])
    out, lse = om.attention(q, k, v, causal=True, key_padding_mask=keep, return_lse=True)
    out.sum().backward()
    assert torch.equal(out[0, :2], torch.zeros_like(out[0, :2]))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert (lse[0, :, :2] == -math.inf).all()
    assert (lse[1] == -math.inf).all()
    for x, empty in ((q, q.grad[1]), (k, k.grad[1]), (v, v.grad[1])):
        assert torch.isfinite(x.grad).all()
        assert not empty.any()
    assert not q.grad[0, :2].any()


def test_nan_in_the_padding_changes_nothing():
    q, k, v = (draw(2, 9, 2, 8, seed=i) for i in range(3))
    keep = torch.arange(9) < torch.tensor([[9], [4]])
    clean = om.attention(q, k, v, key_padding_mask=keep)
    poisoned = [x.masked_fill(~keep[:, :, None, None], math.nan).requires_grad_() for x in (k, v)]
    out = om.attention(q, *poisoned, key_padding_mask=keep)
    out.sum().backward()
    assert torch.equal(out, clean)
    assert all(torch.isfinite(x.grad).all() for x in poisoned)


def test_a_document_of_nan_does_not_reach_its_neighbours():
    q, k, v = (draw(12, 2, 8, seed=i) for i in range(3))
    ends = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    clean = om.attention(q, k, v, causal=True, cu_seqlens_q=ends)
    for x in (q, k, v):
        x[4:8] = math.nan
    out = om.attention(q, k, v, causal=True, cu_seqlens_q=ends)
    assert torch.equal(out[:4], clean[:4])
    assert torch.equal(out[8:], clean[8:])


def test_scores_of_ten_thousand_neither_overflow_nor_lose_the_winner(implementation):
    q, k, v = (draw(1, 6, 1, 8, seed=i) for i in range(3))
    out, lse = om.attention(100 * q, 100 * k, v, scale=1.0, return_lse=True)
    expected = reference.attention(100 * q.double(), 100 * k.double(), v.double(), scale=1.0)
    assert lse.abs().max() > 1e4
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


def test_an_additive_mask_far_below_zero_hides_like_minus_infinity():
    q, k, v = (draw(1, 4, 1, 8, seed=i) for i in range(3))
    lowest = torch.zeros(4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
    assert torch.equal(om.attention(q, k, v, mask=lowest), om.attention(q, k, v, mask=lowest == 0))


def test_the_log_sum_exp_takes_no_gradient():
    q, k, v = leaves((1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    _, lse = om.attention(q, k, v, return_lse=True)
    assert not lse.requires_grad


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_projection_gives_the_bits_of_three(kv_heads, implementation):
    qkv = draw(2, 9, (4 + 2 * kv_heads) * 8).requires_grad_()
    whole = om.attention_qkv(qkv, num_heads=4, num_kv_heads=kv_heads, causal=True)
    (dqkv,) = torch.autograd.grad(whole.square().sum(), qkv)
    parts = [x.detach().requires_grad_() for x in qkv.unflatten(-1, (-1, 8)).split((4, kv_heads, kv_heads), -2)]
    out = om.attention(*parts, causal=True)
    grads = torch.autograd.grad(out.square().sum(), parts)
    assert torch.equal(out, whole)
    assert torch.equal(torch.cat(grads, 2).flatten(2), dqkv)


def test_any_layout_of_the_output_gradient_gives_the_same_bits(implementation):
    q, k, v = leaves((2, 9, 2, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    out = om.attention(q, k, v, causal=True)
    ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    expanded = torch.autograd.grad(out, (q, k, v), torch.ones(()).expand(out.shape), retain_graph=True)
    dense = draw(2, 9, 2, 8, seed=9)
    straight = torch.autograd.grad(out, (q, k, v), dense, retain_graph=True)
    strided = torch.autograd.grad(out, (q, k, v), dense.transpose(1, 3).contiguous().transpose(1, 3))
    assert all(torch.equal(a, b) for a, b in zip(ones + straight, expanded + strided, strict=True))


@pytest.mark.parametrize("causal", [False, "top_left"])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(("first", "second"), [(eager, vendor), (vendor, eager)])
def test_the_backward_of_one_goes_on_from_the_forward_of_another(causal, kv_heads, first, second):
    q, k, v, dout = draw(2, 9, 4, 8), draw(2, 7, kv_heads, 8, seed=1), draw(2, 7, kv_heads, 8, seed=2), draw(2, 9, 4, 8, seed=3)
    p = problem_of(q, k, None, None, None, Rule(0.3, False, -1, 0 if causal else -1, 0.0, 0, 0, 0.0))
    config = {eager: None, vendor: "flash_cpu"}
    out, lse = first.launch_fwd(p, config[first], q, k, v, *NOTHING)
    other_out, other_lse = second.launch_fwd(p, config[second], q, k, v, *NOTHING)
    torch.testing.assert_close((out, lse), (other_out, other_lse))
    crossed = second.launch_bwd(p, config[second], dout, q, k, v, out, lse, *NOTHING)
    straight = first.launch_bwd(p, config[first], dout, q, k, v, out, lse, *NOTHING)
    torch.testing.assert_close(crossed, straight)


def test_a_dropout_mask_belongs_to_rows_not_to_the_cut_of_the_batch():
    q, k, v = (draw(3, 8, 2, 8, seed=i) for i in range(3))
    rng = om.Rng(5)
    whole = om.attention(q, k, v, dropout_p=0.4, rng=rng)
    last = om.attention(q[2:], k[2:], v[2:], dropout_p=0.4, rng=rng.at_row(16))
    ends = torch.tensor([0, 8, 16, 24])
    packed = om.attention(*(x.flatten(0, 1) for x in (q, k, v)), dropout_p=0.4, rng=rng, cu_seqlens_q=ends)
    torch.testing.assert_close(last, whole[2:])
    torch.testing.assert_close(packed.view_as(whole), whole)
    assert not torch.equal(whole, om.attention(q, k, v, dropout_p=0.4, rng=rng.child(1)))


def test_dropout_keeps_the_expected_share_and_mean():
    q, k = torch.zeros(1, 64, 2, 8), torch.zeros(1, 256, 2, 8)
    out = om.attention(q, k, torch.ones(1, 256, 2, 8), dropout_p=0.25, rng=om.Rng(1))
    assert abs(out.mean().item() - 1.0) < 0.02
    assert out.std().item() > 0.01


def test_under_autocast_all_three_are_cast_and_gradients_come_back_in_their_own_dtype():
    q, k, v = leaves((1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        out = om.attention(q, k.detach().bfloat16(), v)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert q.grad.dtype == v.grad.dtype == torch.float32


@pytest.mark.parametrize("block", [16, 64, 2**19])
def test_the_size_of_a_block_of_scores_changes_rounding_only(block, monkeypatch):
    monkeypatch.setattr(eager, "BLOCK_SCORES", block)
    q, k, v = leaves((2, 37, 4, 8), (2, 29, 2, 8), (2, 29, 2, 8), dtype=torch.float64)
    options = {"causal": True, "window": (11, 0), "dropout_p": 0.2, "rng": om.Rng(3)}
    with om.force(attention="eager"):
        grads = torch.autograd.grad(om.attention(q, k, v, **options).square().sum(), (q, k, v))
    expected = torch.autograd.grad(reference.attention(q, k, v, **options).square().sum(), (q, k, v))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("queries", [1, 5, 9])
@pytest.mark.parametrize("keys", [1, 6, 9])
@pytest.mark.parametrize("corner", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (0, 0), (2, 1), (-1, 2)])
def test_the_cost_model_counts_visible_pairs_exactly(queries, keys, corner, window):
    q, k = torch.empty(2, queries, 1, 8), torch.empty(2, keys, 1, 8)
    p = problem_of(q, k, None, None, None, Rule(1.0, corner, *window, 0.0, 0, 0, 0.0))
    seen = reference.visible(queries, keys, False if corner else "top_left", window, q.device) if corner else None
    if seen is None:
        at = torch.arange(queries)[:, None]
        seen = torch.ones(queries, keys, dtype=torch.bool)
        seen &= (torch.arange(keys) >= at - window[0]) if window[0] >= 0 else True
        seen &= (torch.arange(keys) <= at + window[1]) if window[1] >= 0 else True
    assert pairs(p) == 2 * int(seen.sum())


@pytest.mark.parametrize(("tokens", "described"), [(132_104, True), (132_105, False)])
def test_heads_one_behind_the_other_come_through_descriptors_while_32_bits_count_their_elements(tokens, described):
    pytest.importorskip("triton", reason="missing capability: Triton")
    from ops_math.ops.attention import triton_gpu

    q = torch.empty(1, 128, tokens, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    p = problem_of(q, q, None, None, None, Rule(1.0, True, -1, 0, 0.0, 0, 0, 0.0))
    views = triton_gpu._views(p, True, 64, q, q)
    assert [v is not None and max(v.shape) < 2**31 for v in views] == [described] * 2
    assert [v is None for v in views] == [not described] * 2


@pytest.mark.parametrize("ends", [None, (0, 300, 512)], ids=["one document", "two documents"])
def test_in_16_bits_the_cpu_kernels_backward_adds_up_in_fp32(ends):
    made = [draw(*((1, 512) if ends is None else (512,)), heads, 16, seed=n).bfloat16() for n, heads in enumerate((2, 1, 1, 2))]
    q, k, v, dout = made
    cu = None if ends is None else torch.tensor(ends)
    p = problem_of(q, k, None, None, cu, Rule(0.25, False, -1, 0, 0.0, 0 if cu is None else 300, 0 if cu is None else 300, 0.0))
    device = backends.device_of(q.device)
    assert vendor.configs(p, device, "fwd") == ("flash_cpu",)
    assert vendor.configs(p, device, "bwd") == ("flash_cpu_wide",)
    assert vendor.against("flash_cpu", p, device, "bwd") == "adds up the gradients of keys and values in 16 bits"
    masks = (None, None, cu, cu, None)
    out, lse = vendor.launch_fwd(p, "flash_cpu", q, k, v, *masks)
    exact = eager.launch_bwd(p._replace(dtype="fp64"), None, *(t.double() for t in (dout, q, k, v, out, lse)), *masks)
    found = {config: vendor.launch_bwd(p, config, dout, q, k, v, out, lse, *masks) for config in ("flash_cpu", "flash_cpu_wide")}
    error = {config: [(g.double() - e).norm() / e.norm() for g, e in zip(grads, exact, strict=True)] for config, grads in found.items()}
    assert [g.dtype for g in found["flash_cpu_wide"]] == [torch.bfloat16] * 3
    assert max(error["flash_cpu_wide"]) < 0.003  # one rounding to bf16 is 0.0017
    assert error["flash_cpu"][2] > 1.5 * error["flash_cpu_wide"][2]


def test_rows_that_are_one_and_the_same_do_not_come_through_descriptors():
    """The gradient of a sum over the tokens."""
    pytest.importorskip("triton", reason="missing capability: Triton")
    from ops_math.ops.attention import triton_gpu

    q = torch.empty(2, 64, 4, 64, dtype=torch.bfloat16, device="meta")
    p = problem_of(q, q, None, None, None, Rule(1.0, True, -1, 0, 0.0, 0, 0, 0.0))
    same = q[:, :1].expand(2, 64, 4, 64)
    assert triton_gpu._views(p, True, 64, q, same)[0] is None
    assert triton_gpu._views(p, True, 64, q, q)[0] is not None


def test_tokens_without_any_document_are_refused_since_nobody_would_write_their_rows():
    x, none = draw(5, 2, 8), torch.tensor([0])
    with pytest.raises(om.ArgumentError) as error:
        om.attention(x, x, x, cu_seqlens_q=none)
    words = "got [1], which are no documents, for 5 tokens. One document of all tokens is [0, 5]."
    assert str(error.value) == f"attention: cu_seqlens_q must be of shape [documents + 1]; {words}"
    with pytest.raises(om.ArgumentError, match=r"^attention: cu_seqlens_k must be of shape \[documents \+ 1\]; got \[1\]"):
        om.attention(x[:0], x, x, cu_seqlens_q=none, cu_seqlens_k=none)
    assert om.attention(x[:0], x[:0], x[:0], cu_seqlens_q=none).shape == (0, 2, 8)


def test_trying_what_the_cpu_kernels_take_leaves_the_users_random_numbers_as_they_are() -> None:
    vendor._cpu_groups.cache_clear()
    before = torch.get_rng_state()
    vendor._cpu_groups()
    assert torch.equal(torch.get_rng_state(), before)
