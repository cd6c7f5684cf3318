"""What a user mistypes or asks too much of is answered in words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ops_math as om
from ops_math import ArgumentError, UnsupportedError
from tests.spine.test_settings import run_python


def test_a_mistyped_off_switch_is_refused():
    assert "OPS_MATH_ENABLED must be one of '0', '1'; got 'false'" in run_python(
        "import ops_math as om, torch; om.rms_norm(torch.ones(2, 4))", OPS_MATH_ENABLED="false"
    )


def test_forcing_an_unknown_operator_or_implementation_is_refused_at_once():
    with pytest.raises(ArgumentError, match=r"^force: operator must be one of .*; got 'attn'"):
        om.force(attn="eager")
    with pytest.raises(ArgumentError, match=r"^force: attention must be one of 'triton_gpu', 'vendor', 'eager'; got 'cuda'"):
        om.force(attention="cuda")


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_transforms_that_differentiate_are_refused_instead_of_giving_zeros(transform):
    x = torch.randn(4, 8)
    with pytest.raises(UnsupportedError, match=r"^ops_math under torch\.func: grad, jvp and their kind are not supported\."):
        transform(lambda t: om.rms_norm(t).sum())(x)


def test_a_tangent_is_refused_instead_of_zero():
    x = torch.randn(4, 8)
    with pytest.raises(UnsupportedError, match=r"^ops_math under torch\.func"):
        torch.func.jvp(om.softmax, (x,), (x,))
    with om.enabled(False):
        assert torch.func.jvp(om.softmax, (x,), (x,))[1].abs().max() > 0


def test_a_tangent_of_forward_mode_is_refused_instead_of_lost():
    from torch.autograd import forward_ad

    x = torch.randn(4, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (om.rms_norm, om.gelu, om.softmax):
            with pytest.raises(
                UnsupportedError, match=r"^ops_math under forward-mode AD: .*Use autograd, or ops_math\.enabled\(False\)\.$"
            ):
                call(dual)
        assert torch.equal(om.softmax(x), om.softmax(x.clone()))  # without a tangent nothing is lost
        with om.enabled(False):
            assert forward_ad.unpack_dual(om.softmax(dual)).tangent is not None


@pytest.mark.parametrize("learned", [True, False])
def test_vmap_is_refused_in_our_own_words_with_and_without_gradients(learned):
    x, weight = torch.randn(3, 4, 8), torch.ones(8, requires_grad=learned)
    with pytest.raises(
        UnsupportedError, match=r"^ops_math::\w+: vmap is not supported\. Give the operator the batch as a leading dimension"
    ):
        torch.vmap(lambda t: om.rms_norm(t, weight))(x)


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "jagged", "nested"])
@pytest.mark.parametrize("name", ["rms_norm", "gelu", "softmax", "swiglu_packed", "linear"])
def test_a_tensor_that_is_not_dense_is_refused_with_what_to_do(name, layout):
    x = torch.randn(4, 8)
    if layout in ("jagged", "nested"):
        kind = torch.jagged if layout == "jagged" else torch.strided
        x, got, do = torch.nested.nested_tensor([x, x[:2]], layout=kind), "a nested tensor", r"Pad it, \w+\.to_padded_tensor\(0\.0\)"
    else:
        x, got, do = x.to_sparse(layout=getattr(torch, layout)), f"one of layout {layout}", r"Convert it: \w+\.to_dense\(\)\."
    more = (torch.ones(3, 8),) if name == "linear" else ()
    with pytest.raises(ArgumentError, match=rf"^{name}: \w+ must be a dense tensor; got {got}\. {do}"):
        getattr(om, name)(x, *more)
    with pytest.raises(ArgumentError, match=rf"^residual_mlp: x must be a dense tensor; got {got}\. {do}"):
        om.residual_mlp(x, nn.RMSNorm(8), nn.Linear(8, 8))


def test_a_tensor_that_is_shared_among_ranks_is_refused_with_what_to_do(tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.randn(4, 8), init_device_mesh("cpu", (1,)), [Replicate()])
        words = r"x must be a tensor of this rank; got DTensor\. Pass x\.to_local\(\), or call it within .*local_map\.$"
        with pytest.raises(ArgumentError, match=rf"^rms_norm: {words}"):
            om.rms_norm(x, torch.ones(8))
        with pytest.raises(ArgumentError, match=rf"^residual_mlp: {words}"):
            om.residual_mlp(x, nn.RMSNorm(8), nn.Linear(8, 8))
        assert om.rms_norm(x.to_local(), torch.ones(8)).shape == (4, 8)
    finally:
        distributed.destroy_process_group()


def test_a_module_that_runs_as_it_is_may_take_a_nested_tensor():
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
    assert om.residual_mlp(x, None, Own()).is_nested


@pytest.mark.parametrize("key", [1.5, "0", None])
def test_a_key_is_a_whole_number(key):
    with pytest.raises(ArgumentError, match=r"^Rng: key must be a whole number or an integer tensor \[\]; got .*Pass e\.g\. ops_math\.Rng"):
        om.Rng(key)


def test_a_complex_tensor_is_not_to_be_converted_by_losing_half_of_it():
    with pytest.raises(ArgumentError, match=r"got complex64\. There is no complex arithmetic here; its parts are x\.real and x\.imag\.$"):
        om.rms_norm(torch.ones(2, 4, dtype=torch.complex64))


@pytest.mark.parametrize("autocast", [True, False])
def test_shapes_are_found_on_the_meta_device(autocast):
    with torch.device("meta"):
        x, norm, attn = torch.ones(2, 5, 32, requires_grad=True), nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = om.residual_mlp(om.residual_attention(x, norm, attn), norm, mlp)
            loss = om.linear_cross_entropy(y, torch.ones(7, 32), torch.zeros(2, 5, dtype=torch.int64))
            loss.backward()
    assert y.shape == x.grad.shape == x.shape
    assert x.grad.device.type == "meta"


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf")])
def test_an_eps_that_is_no_small_number_is_refused(eps):
    x = torch.randn(4, 8)
    for call in (om.rms_norm, om.layer_norm):
        with pytest.raises(ArgumentError, match="eps must be finite and at least 0"):
            call(x, eps=eps)


def test_an_integer_mask_is_refused_with_both_meanings():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ArgumentError, match=r"mask must be boolean .* or floating point .*; got int64\. Pass mask\.bool\(\)"):
        om.attention(q, q, q, mask=torch.ones(4, 4, dtype=torch.int64))


def test_an_empty_batch_goes_through_a_block():
    x = torch.randn(0, 16, 64)
    assert om.residual_attention(x, nn.RMSNorm(64), nn.MultiheadAttention(64, 4, batch_first=True)).shape == x.shape


def test_an_encoder_layer_of_the_other_order_is_refused():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with pytest.raises(ArgumentError, match=r"^residual_mlp: norm_first must be False, as the layer is built; got True\."):
        om.residual_mlp(torch.randn(2, 4, 32), layer.norm2, layer)


class Own(nn.Module):
    """An attention of the user's own."""

    def forward(self, x):
        """x."""
        return x


def test_a_keyword_of_the_fused_path_on_a_module_that_is_not_read_says_why():
    with pytest.raises(
        ArgumentError, match=r"^residual_attention: causal must be taken by the module's own forward.*Own is not in the table"
    ):
        om.residual_attention(torch.randn(2, 4, 8), nn.RMSNorm(8), Own(), causal=True)


def test_a_keyword_that_neither_block_nor_module_has_names_what_they_have():
    x, norm = torch.randn(2, 4, 8), nn.RMSNorm(8)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    words = r"^residual_mlp: keywords must be among norm_first, next_norm, defer, dropout_p, rng, narrow and those of Sequential\.forward"
    with pytest.raises(ArgumentError, match=words + r"; got norm_fist\. Did you mean norm_first=\?$"):
        om.residual_mlp(x, norm, mlp, norm_fist=True)
    with pytest.raises(ArgumentError, match=r"; got dropout\. Write dropout_p= for it\.$"):
        om.residual_attention(x, norm, nn.MultiheadAttention(8, 2, batch_first=True), dropout=0.1)


@pytest.mark.parametrize("module", [None, torch.ones(8), 3], ids=["None", "tensor", "number"])
def test_what_is_no_module_is_refused_where_a_module_belongs(module):
    x, norm = torch.randn(2, 4, 8), nn.RMSNorm(8)
    for block, what in ((om.residual_mlp, "mlp"), (om.residual_attention, "attn")):
        with pytest.raises(ArgumentError, match=rf"^{block.__name__}: {what} must be an nn\.Module or a function; got "):
            block(x, norm, module)
        if module is not None:
            with pytest.raises(ArgumentError, match=rf"^{block.__name__}: norm must be an nn\.Module, a function or None; got "):
                block(x, module, nn.Linear(8, 8))
