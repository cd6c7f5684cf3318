"""What is special to the rotary embedding; the general contract is tested over CASES in tests/conformance."""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from ops_math.ops.rope import op_inplace, reference
from ops_math.ops.rope.op import OP, Heads


def tables(rows, half, dtype=torch.float64):
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_of_turned_queries_and_keys_depend_on_their_distance_alone(interleaved):
    cos, sin = tables(40, 16)
    q, k = normal(1, 1, 1, 32).expand(1, 40, 1, 32), normal(1, 1, 1, 32).flip(-1).expand(1, 40, 1, 32)
    q, k = om.rope(q, k, cos, sin, interleaved=interleaved)
    scores = torch.einsum("bshd,bthd->st", q, k)
    for distance in (0, 1, 7, 39):
        same = scores.diagonal(distance)
        assert torch.allclose(same, same[0].expand_as(same), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_backward_of_a_rotation_undoes_it(interleaved):
    cos, sin = tables(9, 32)
    q, k = normal(2, 9, 4, 64).requires_grad_(), normal(2, 9, 2, 64).requires_grad_()
    turned = om.rope(q, k, cos, sin, interleaved=interleaved)
    back = torch.autograd.grad(turned, (q, k), [t.detach() for t in turned])
    for given, returned in zip((q, k), back, strict=True):
        assert torch.allclose(given, returned, rtol=1e-12, atol=1e-12)


def test_duplicated_halves_and_the_first_half_alone_give_the_same_bits():
    cos, sin = tables(9, 16, torch.float32)
    q, k = normal(2, 9, 4, 32, dtype=torch.float32), normal(2, 9, 2, 32, dtype=torch.float32)
    short = om.rope(q, k, cos, sin)
    for wide in ((cos.repeat(1, 2), sin.repeat(1, 2)), (cos.repeat(1, 2)[None], sin.repeat(1, 2)[None])):
        for a, b in zip(short, om.rope(q, k, *wide), strict=True):
            assert torch.equal(a, b)


def test_only_the_first_half_of_duplicated_tables_is_read():
    cos, sin = tables(9, 16, torch.float32)
    spoiled = [torch.cat((t, torch.full_like(t, float("nan"))), -1) for t in (cos, sin)]
    q, k = normal(2, 9, 4, 32, dtype=torch.float32), normal(2, 9, 2, 32, dtype=torch.float32)
    for interleaved in (False, True):
        for a, b in zip(om.rope(q, k, cos, sin, interleaved=interleaved), om.rope(q, k, *spoiled, interleaved=interleaved), strict=True):
            assert torch.equal(a, b)


def test_the_values_of_a_packed_tensor_pass_bit_for_bit_infinities_and_nan_too():
    cos, sin = tables(3, 8, torch.float32)
    qkv = normal(1, 3, 8 * 16, dtype=torch.float32)
    qkv[..., -16:] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-40] * 4)
    out = om.rope_qkv(qkv, cos, sin, num_heads=4, num_kv_heads=2)
    assert torch.equal(out[..., 6 * 16 :].nan_to_num(7.0), qkv[..., 6 * 16 :].nan_to_num(7.0))


def test_nothing_of_queries_and_keys_is_saved():
    cos, sin = tables(9, 16, torch.float32)
    q, k = normal(2, 9, 4, 32, dtype=torch.float32).requires_grad_(), normal(2, 9, 2, 32, dtype=torch.float32).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        om.rope(q, k, cos, sin)
    assert {t.data_ptr() for t in saved} == {cos.data_ptr(), sin.data_ptr()}


@pytest.mark.parametrize("position", [-1, 9])
def test_a_position_outside_the_tables_is_named_on_the_cpu(position):
    cos, sin = tables(9, 16, torch.float32)
    ids = torch.tensor([0, position, 2])
    q = normal(1, 3, 2, 32, dtype=torch.float32)
    words = rf"rope: position_ids must be at least 0 and below 9, the tables' rows; got a position of {position}\. "
    with pytest.raises(om.ArgumentError, match=words + r"Make longer tables or check the positions\."):
        om.rope(q, q, cos, sin, position_ids=ids)


def test_a_narrow_table_of_two_dimensions_asks_for_the_rotary_width():
    cos, sin = tables(5, 8, torch.float32)
    q = normal(1, 5, 2, 64, dtype=torch.float32)
    words = r"rope: rotary_dim must be given, since a table of width 8 may be R = 8 with duplicated halves or R/2 of R = 16; got None\. "
    with pytest.raises(om.ArgumentError, match=words + r"Pass rotary_dim=8 or rotary_dim=16\."):
        om.rope(q, q, cos, sin)


REFUSED = {
    "k of another width": (
        lambda q, c, s: om.rope(q, q[..., :32], c, s),
        r"rope: k must be \[1, 5, heads, 64\], with the tokens and width of q",
    ),
    "tables that learn": (lambda q, c, s: om.rope(q, q, c.clone().requires_grad_(), s), r"rope: cos must be a constant"),
    "short tables": (lambda q, c, s: om.rope(q, q, c[:3], s[:3]), r"rope: cos must be a table of at least 5 rows, one for each token"),
    "sin of another shape": (lambda q, c, s: om.rope(q, q, c, s[:, :16]), r"rope: sin must be of shape \[5, 32\], as cos is"),
    "an odd rotary width": (
        lambda q, c, s: om.rope(q, q, c, s, rotary_dim=33),
        r"rope: rotary_dim must be even, above 0 and at most the head's",
    ),
    "integers": (lambda q, c, s: om.rope(q.long(), q, c, s), r"rope: q must be floating point"),
    "float positions": (
        lambda q, c, s: om.rope(q, q, c, s, position_ids=torch.zeros(5)),
        r"rope: position_ids must be an int64 or int32 tensor",
    ),
    "positions for other tokens": (
        lambda q, c, s: om.rope(q, q, c, s, position_ids=torch.zeros(4, dtype=torch.long)),
        r"rope: position_ids must be \[5\] or \[1, 5\], one for each token; got shape \[4\]",
    ),
    "heads that do not divide": (
        lambda q, c, s: om.rope_qkv(q.flatten(-2), c, s, num_heads=3, num_kv_heads=1),
        r"rope_qkv: qkv must be of a last dimension that 5 heads divide \(3 \+ 2 x 1\); got shape \[1, 5, 128\]",
    ),
    "an expanded tensor in place": (
        lambda q, c, s: op_inplace.rope_qkv_(q.new_zeros(1, 1, 256).expand(1, 5, 256), c, s, num_heads=2, num_kv_heads=1),
        r"rope_qkv_: qkv must be dense along its last dimension, each element in memory of its own",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_does_not_fit_is_refused_in_words(what):
    call, words = REFUSED[what]
    cos, sin = tables(5, 32, torch.float32)
    with pytest.raises(om.ArgumentError, match=words):
        call(normal(1, 5, 2, 64, dtype=torch.float32), cos, sin)


def packed_loss(turn, weight, x, cos, sin):
    """A block's use: a product, the rotation of its fresh result, something that saves what it is given."""
    qkv = turn(x @ weight, cos, sin, num_heads=4, num_kv_heads=2)
    return (qkv * qkv.sin()).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_place_gives_the_bits_and_gradients_of_the_functional_form(dtype):
    cos, sin = tables(7, 8, dtype)
    results = []
    for turn in (om.rope_qkv, op_inplace.rope_qkv_):
        x, weight = normal(2, 7, 24, dtype=dtype).requires_grad_(), normal(24, 8 * 16, dtype=dtype).requires_grad_()
        loss = packed_loss(turn, weight, x, cos, sin)
        results.append((loss.detach(), *torch.autograd.grad(loss, (x, weight))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_in_place_writes_into_the_tensor_and_leaves_the_values_alone():
    cos, sin = tables(7, 8, torch.float32)
    qkv = normal(2, 7, 8 * 16, dtype=torch.float32)
    kept = qkv.clone()
    out = op_inplace.rope_qkv_(qkv, cos, sin, num_heads=4, num_kv_heads=2)
    assert out is qkv
    assert torch.equal(out, om.rope_qkv(kept, cos, sin, num_heads=4, num_kv_heads=2))
    op_inplace.turn_packed_(out, cos, sin, None, Heads(4, 2, 16, False), inverse=True)
    assert torch.allclose(out, kept, atol=1e-6)


def test_in_place_on_a_tensor_that_autograd_saved_fails_in_the_backward():
    cos, sin = tables(7, 8, torch.float32)
    weight = normal(24, 8 * 16, dtype=torch.float32).requires_grad_()
    qkv = normal(2, 7, 24, dtype=torch.float32) @ weight
    other = qkv.square().sum()
    op_inplace.rope_qkv_(qkv, cos, sin, num_heads=4, num_kv_heads=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_in_place_below_autograd_is_noticed_too():
    cos, sin = tables(7, 8, torch.float32)
    weight = normal(24, 8 * 16, dtype=torch.float32).requires_grad_()
    qkv = normal(2, 7, 24, dtype=torch.float32) @ weight
    other = qkv.square().sum()
    with torch.no_grad():
        op_inplace.turn_packed_(qkv, cos, sin, None, Heads(4, 2, 16, False))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_in_place_on_a_leaf_that_learns_is_refused():
    cos, sin = tables(7, 8, torch.float32)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        op_inplace.rope_qkv_(normal(2, 7, 8 * 16, dtype=torch.float32).requires_grad_(), cos, sin, num_heads=4, num_kv_heads=2)


def test_the_backward_of_the_in_place_form_leaves_the_incoming_gradient_as_it_was():
    cos, sin = tables(7, 8, torch.float32)
    weight = normal(24, 8 * 16, dtype=torch.float32).requires_grad_()
    out = op_inplace.rope_qkv_(normal(2, 7, 24, dtype=torch.float32) @ weight, cos, sin, num_heads=4, num_kv_heads=2)
    incoming = normal(*out.shape, dtype=torch.float32)
    kept = incoming.clone()
    out.backward(incoming)
    assert torch.equal(incoming, kept)


def test_in_place_after_a_linear_layer_with_bias_has_the_gradients_of_the_reference():
    cos, sin = tables(7, 8)
    layer = torch.nn.Linear(24, 8 * 16, dtype=torch.float64)
    x = normal(2, 7, 24).requires_grad_()
    learning = (x, layer.weight, layer.bias)
    fed = normal(2, 7, 8 * 16)
    ours = torch.autograd.grad(op_inplace.rope_qkv_(layer(x), cos, sin, num_heads=4, num_kv_heads=2), learning, fed)
    wanted = torch.autograd.grad(reference.rope_qkv(layer(x), cos, sin, num_heads=4, num_kv_heads=2), learning, fed)
    for a, b in zip(ours, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_compiled_the_in_place_form_gives_the_same_bits():
    cos, sin = tables(7, 8, torch.float32)
    results = []
    for fn in (packed_loss, torch.compile(packed_loss, fullgraph=True, backend="aot_eager")):
        x, weight = normal(2, 7, 24, dtype=torch.float32).requires_grad_(), normal(24, 8 * 16, dtype=torch.float32).requires_grad_()
        loss = fn(op_inplace.rope_qkv_, weight, x, cos, sin)
        results.append((loss.detach(), *torch.autograd.grad(loss, (x, weight))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_opcheck_accepts_the_in_place_operator():
    cos, sin = tables(7, 8, torch.float32)
    args = (normal(2, 7, 8, 16, dtype=torch.float32), cos, sin, None, 16, 6, False, False)
    assert set(torch.library.opcheck(OP.phases["inplace"].overload, args, raise_exception=False).values()) == {"SUCCESS"}
