from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ops_math as om
from ops_math.ops.cross_entropy import reference

SYNCHRONISING = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique")


class _Seen(TorchDispatchMode):
    """Names of all PyTorch functions called, those inside our launchers too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::"))
        if func.namespace == "ops_math":
            operator, _, phase = func._schema.name.removeprefix("ops_math::").rpartition("_")
            from ops_math import catalog

            with self:
                return catalog.operators()[operator].phases[phase](*args)
        return func(*args, **(kwargs or {}))


def _inputs(rows=12, classes=40, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator).to(dtype)
    return logits.requires_grad_(), torch.randint(0, classes, (rows,), generator=generator)


def test_without_a_mean_each_row_is_scaled_by_its_own_gradient():
    logits, target = _inputs()
    dloss = torch.linspace(-2, 3, 12)
    (got,) = torch.autograd.grad(om.cross_entropy(logits, target, reduction="none"), logits, dloss)
    (want,) = torch.autograd.grad(F.cross_entropy(logits, target, reduction="none"), logits, dloss)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got[0], got[1] * dloss[0] / dloss[1])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_plain_call_gives_what_pytorch_gives(reduction):
    logits, target = _inputs()
    target[3] = -100
    torch.testing.assert_close(om.cross_entropy(logits, target, reduction=reduction), F.cross_entropy(logits, target, reduction=reduction))


@pytest.mark.parametrize("rows", [0, 5])
def test_the_mean_of_nothing_is_nan_with_a_zero_gradient_as_in_pytorch(rows):
    logits, target = _inputs(rows)
    target.fill_(-100)
    for fn in (om.cross_entropy, F.cross_entropy):
        loss = fn(logits, target)
        (dlogits,) = torch.autograd.grad(loss, logits)
        assert loss.isnan()
        assert torch.equal(dlogits, torch.zeros_like(logits))


@pytest.mark.parametrize("count", [17, 0])
def test_a_rank_without_tokens_has_loss_and_gradient_zero_when_the_token_count_is_given(count):
    logits, target = _inputs(5)
    loss = om.cross_entropy(logits, target.fill_(-100), num_tokens=torch.tensor(count))
    (dlogits,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0
    assert torch.equal(dlogits, torch.zeros_like(logits))


@pytest.mark.parametrize("bad", [40, -1, 2**40, -(2**62)])
def test_a_target_outside_the_vocabulary_makes_its_row_nan_and_no_other(bad):
    logits, target = _inputs()
    target[4] = bad
    loss = om.cross_entropy(logits, target, reduction="none")
    (dlogits,) = torch.autograd.grad(loss.sum(), logits)
    others = torch.arange(12) != 4
    assert loss[4].isnan()
    assert dlogits[4].isnan().all()
    assert loss[others].isfinite().all()
    assert dlogits[others].isfinite().all()
    assert om.cross_entropy(logits, target).isnan()


def test_checked_mode_names_the_position_and_value_of_a_bad_target():
    logits, target = torch.randn(2, 3, 7), torch.tensor([[0, -100, 6], [1, 9, -3]])
    with om.checked(), pytest.raises(om.ArgumentError) as error:
        om.cross_entropy(logits, target)
    assert str(error.value) == (
        "cross_entropy: target must be a class in [0, 7) or ignore_index -100; got 9 at [1, 1] (2 in all). "
        "Check the tokenizer's vocabulary against the model's, and the padding value."
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none", "softcap": 5.0},
        {"class_weight": torch.rand(40), "label_smoothing": 0.1, "z_loss": 1e-3},
        {"num_tokens": torch.tensor(9)},
    ],
    ids=["mean", "none", "weighted", "token count"],
)
def test_no_call_waits_for_the_device(options):
    logits, target = _inputs()
    target[0] = -100
    with _Seen() as seen:
        loss = om.cross_entropy(logits, target, **options)
        torch.autograd.grad(loss, logits, torch.ones_like(loss))
    assert "sub" in seen.names, "the watch did not see inside the launchers"
    assert not seen.names & set(SYNCHRONISING)


def test_two_backwards_give_the_same_bits():
    logits, target = _inputs(dtype=torch.bfloat16)
    loss = om.cross_entropy(logits, target)
    first = torch.autograd.grad(loss, logits, torch.tensor(3.0), retain_graph=True)[0].clone()
    (second,) = torch.autograd.grad(loss, logits, torch.tensor(3.0))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_at_a_confident_target_is_not_lost_to_16_bits(dtype):
    logits = torch.zeros(1, 3, dtype=dtype)
    logits[0, 1] = 8.0
    logits.requires_grad_()
    (got,) = torch.autograd.grad(om.cross_entropy(logits, torch.tensor([1])), logits)
    wide = logits.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(reference.cross_entropy(wide, torch.tensor([1])), wide)
    assert want[0, 1].abs() < 1e-3
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=0)


def test_the_loss_of_16_bit_logits_is_fp32():
    logits, target = _inputs(dtype=torch.bfloat16)
    assert om.cross_entropy(logits, target).dtype == torch.float32
    assert om.cross_entropy(logits, target, reduction="none").dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"reduction": "average"}, "reduction must be one of 'none', 'mean', 'sum'; got 'average'. Pick one of these."),
        ({"label_smoothing": 1.5}, "label_smoothing must be in [0, 1]; got 1.5. Pass a number from 0 to 1."),
        ({"z_loss": -1.0}, "z_loss must be in [0, inf]; got -1.0. Pass a number from 0 to inf."),
        ({"softcap": 0.0}, "softcap must be above 0; got 0.0. Pass a positive softcap."),
        ({"num_tokens": 5}, "num_tokens must be a tensor []; got int. Keep the count on the device: torch.tensor(n, device=...)."),
        ({"num_tokens": torch.ones(2)}, "num_tokens must be a tensor []; got shape [2]. Reduce it to one number: num_tokens.sum()."),
        (
            {"num_tokens": torch.tensor(5), "reduction": "sum"},
            "num_tokens must be None unless reduction is 'mean'; got a tensor with reduction 'sum'. "
            "Use reduction='mean', or divide yourself.",
        ),
        (
            {"class_weight": torch.ones(41)},
            "class_weight must be of shape [40] (one weight a class); got shape [41]. Check that both come from the same layer.",
        ),
        (
            {"class_weight": torch.ones(40).requires_grad_()},
            "class_weight must be a constant; got a tensor that requires a gradient. Pass class_weight.detach().",
        ),
    ],
)
def test_a_bad_option_is_refused_in_words(options, sentence):
    logits, target = _inputs()
    with pytest.raises(om.ArgumentError) as error:
        om.cross_entropy(logits, target, **options)
    assert str(error.value) == "cross_entropy: " + sentence


def test_targets_of_the_wrong_kind_or_shape_are_refused_in_words():
    logits, target = _inputs()
    with pytest.raises(om.ArgumentError, match="target must be an int64 or int32 tensor; got fp32"):
        om.cross_entropy(logits, target.float())
    with pytest.raises(om.ArgumentError, match=r"target must be of shape \[12\] \(logits without its last dimension\); got shape \[4, 3\]"):
        om.cross_entropy(logits, target.view(4, 3))
    with pytest.raises(om.ArgumentError, match="logits must be of at least one element in dimension -1"):
        om.cross_entropy(torch.empty(4, 0), torch.zeros(4, dtype=torch.int64))
