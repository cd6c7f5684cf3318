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
