from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ops_math as om
from ops_math.ops.cross_entropy import eager_linear, op_linear, reference_linear
from ops_math.ops.cross_entropy.test_cross_entropy import FAR, SYNCHRONISING, _Seen, far_logits, too_wrong


def _inputs(rows=12, hidden=16, classes=40, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, hidden, generator=generator).to(dtype), torch.randn(classes, hidden, generator=generator).to(dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, classes, (rows,), generator=generator)


def test_without_a_mean_each_row_is_scaled_by_its_own_gradient():
    x, weight, target = _inputs()
    dloss = torch.linspace(-2, 3, 12)
    got = torch.autograd.grad(om.linear_cross_entropy(x, weight, target, reduction="none"), (x, weight), dloss)
    want = torch.autograd.grad(F.cross_entropy(x @ weight.T, target, reduction="none"), (x, weight), dloss)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_follow_the_gradient_of_the_loss(recompute):
    x, weight, target = _inputs()
    loss = om.linear_cross_entropy(x, weight, target, recompute=recompute)
    one = torch.autograd.grad(loss, (x, weight), torch.tensor(1.0), retain_graph=True)
    three = torch.autograd.grad(loss, (x, weight), torch.tensor(-3.0), retain_graph=True)
    again = torch.autograd.grad(loss, (x, weight), torch.tensor(1.0))
    for a, b, c in zip(one, three, again, strict=True):
        torch.testing.assert_close(-3.0 * a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_mean_of_nothing_is_nan_with_a_zero_gradient_as_in_pytorch(rows, recompute):
    x, weight, target = _inputs(rows)
    loss = om.linear_cross_entropy(x, weight, target.fill_(-100), recompute=recompute)
    assert loss.isnan()
    for leaf, grad in zip((x, weight), torch.autograd.grad(loss, (x, weight)), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_a_rank_without_tokens_has_loss_and_gradients_zero_when_the_token_count_is_given():
    x, weight, target = _inputs()
    loss = om.linear_cross_entropy(x, weight, target.fill_(-100), num_tokens=torch.tensor(17))
    assert loss.item() == 0
    for leaf, grad in zip((x, weight), torch.autograd.grad(loss, (x, weight)), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("bad", [40, -1, 2**40])
def test_a_target_outside_the_vocabulary_cannot_go_unnoticed(bad):
    x, weight, target = _inputs()
    target[4] = bad
    loss = om.linear_cross_entropy(x, weight, target, reduction="none")
    dx, dweight = torch.autograd.grad(loss.sum(), (x, weight))
    others = torch.arange(12) != 4
    assert loss[4].isnan()
    assert dx[4].isnan().all()
    assert dweight.isnan().all()
    assert loss[others].isfinite().all()
    assert dx[others].isfinite().all()
    with (
        om.checked(),
        pytest.raises(
            om.ArgumentError, match=rf"linear_cross_entropy: target must be a class in \[0, 40\) or ignore_index -100; got {bad} at \[4\]"
        ),
    ):
        om.linear_cross_entropy(x, weight, target)


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "none"}, {"recompute": True, "label_smoothing": 0.1}, {"num_tokens": torch.tensor(9)}],
    ids=["mean", "none", "recomputed", "token count"],
)
def test_no_call_waits_for_the_device(options):
    x, weight, target = _inputs()
    with _Seen() as seen:
        loss = om.linear_cross_entropy(x, weight, target, **options)
        torch.autograd.grad(loss, (x, weight), torch.ones_like(loss))
    assert "mm" in seen.names, "the watch did not see inside the launchers"
    assert not seen.names & set(SYNCHRONISING)


def test_fp16_gradients_do_not_underflow_when_the_mean_is_over_very_many_tokens():
    x, weight, target = _inputs(dtype=torch.float16)
    loss = om.linear_cross_entropy(x, weight.detach(), target, num_tokens=torch.tensor(2**22))
    (dx,) = torch.autograd.grad(loss, x, torch.tensor(2.0**20))
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(
        reference_linear.linear_cross_entropy(wide, weight.detach().double(), target, num_tokens=torch.tensor(4)), wide
    )
    torch.testing.assert_close(dx.double(), want, rtol=2e-2, atol=2e-3)
    per_row = om.linear_cross_entropy(x, weight.detach(), target, reduction="none")
    (dx,) = torch.autograd.grad(per_row, x, torch.full((12,), 2.0**-22))
    assert torch.equal(
        dx, (2.0**-22 * torch.autograd.grad(om.linear_cross_entropy(x, weight.detach(), target, reduction="none").sum(), x)[0]).to(dx.dtype)
    )


def test_the_weight_gradient_of_an_fp32_weight_is_not_rounded_to_16_bits():
    x, weight, target = _inputs(rows=64, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (dweight,) = torch.autograd.grad(om.linear_cross_entropy(x.detach(), weight, target), weight)
    assert dweight.dtype == torch.float32
    assert not torch.equal(dweight, dweight.bfloat16().float())


def test_widths_that_do_not_fit_are_refused_in_words():
    x, weight, target = _inputs()
    with pytest.raises(om.ArgumentError) as error:
        om.linear_cross_entropy(x, weight[:, :-1], target)
    assert str(error.value) == (
        "linear_cross_entropy: weight must be of shape [40, 16] ([V, H], H the last dimension of x); got shape [40, 15]. "
        "Check that both come from the same layer."
    )
    with pytest.raises(
        om.ArgumentError, match=r"linear_cross_entropy: bias must be of shape \[40\] \(one value a row of weight\); got shape \[39\]"
    ):
        om.linear_cross_entropy(x, weight, target, bias=torch.zeros(39))
    with pytest.raises(
        om.ArgumentError, match=r"linear_cross_entropy: target must be of shape \[12\] \(x without its last dimension\); got shape \[11\]"
    ):
        om.linear_cross_entropy(x, weight, target[:-1])


def test_products_in_bf16_round_once_more_and_no_worse():
    x, weight, target = _inputs(rows=96, hidden=32, classes=700, dtype=torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = torch.autograd.grad(reference_linear.linear_cross_entropy(*wide, target), wide)
    options = (-100, 0.0, 0.0, 0.0, "mean", torch.bfloat16, True, True, False)
    problem = op_linear.OP.phases["fwd"].problem_of(x, weight, target, None, None, None, *options)
    errors = {}
    for config in ("fp32_products", "bf16_products"):
        _, factors, divisor, *grads = eager_linear.launch_fwd(problem, config, x.detach(), weight.detach(), target, None, None, None)
        got = eager_linear.launch_bwd(problem, config, torch.ones(()), x, weight, target, None, None, factors, divisor, *grads)
        errors[config] = [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=False)]
    for once, twice in zip(errors["fp32_products"], errors["bf16_products"], strict=True):
        assert once < twice < 2 * once


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "none"}], ids=["at once", "recomputed", "none"])
@pytest.mark.parametrize("kind", FAR)
def test_far_logits_and_sure_rows_keep_all_digits_of_loss_and_gradient(kind, options):
    logits, target = far_logits(kind, 200)
    for row in range(6):
        one = slice(row, row + 1)
        assert too_wrong(lambda x, y: om.linear_cross_entropy(x, torch.eye(200), y, **options), logits[one], target[one]) == []


VARIANTS = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
from ops_math import catalog
from ops_math.ops.cross_entropy import triton_gpu_linear as kernels
from ops_math.testing import conformance
torch.set_num_threads(1)
operator = catalog.operators()["linear_cross_entropy"]
broken = []
for config in (kernels.Config(16, 64, 8, True, 256, 4), kernels.Config(8, 32, 64, False, 128, 4)):
    kernels.configs = lambda p, device, phase, config=config: (config,)
    operator.forget()
    names = ("mean", "bias, none", "mean, recomputed", "everything", "first and last rows ignored", "only the weight learns, none")
    for case in operator.file("problem").CASES:
        if case.name in names:
            broken += [f"{config}: {b}" for b in conformance.check_budget(operator, case, "fp32", "triton_gpu")]
print("\\n".join(broken) or "none")
"""


@pytest.mark.interpreter
def test_small_chunks_padding_and_the_kernel_of_one_visit_give_the_same_within_the_budget():
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    environment = {**os.environ, "PYTHONPATH": str(Path(om.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, "-c", VARIANTS], env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert answer.stdout.strip() == "none", answer.stdout + answer.stderr[-2000:]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_gradient_of_an_ignored_row_counts_for_nothing_whatever_it_is(bad):
    x, weight, target = torch.randn(5, 16), torch.randn(12, 16), torch.tensor([1, 2, -100, 4, 5])
    fed = torch.rand(5) + 0.5

    def gradients(dloss):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        om.linear_cross_entropy(a, b, target, reduction="none").backward(dloss)
        return a.grad, b.grad

    spoiled = fed.clone()
    spoiled[2] = bad
    for ours, usual in zip(gradients(spoiled), gradients(fed), strict=True):
        assert torch.equal(ours, usual)


def test_a_row_with_an_infinite_gradient_spoils_no_other_rows_gradient():
    x, weight, target = torch.randn(5, 16, requires_grad=True), torch.randn(12, 16), torch.arange(5)
    fed = torch.rand(5) + 0.5
    (usual,) = torch.autograd.grad(om.linear_cross_entropy(x, weight, target, reduction="none"), x, fed)
    fed[3] = float("inf")
    (ours,) = torch.autograd.grad(om.linear_cross_entropy(x, weight, target, reduction="none"), x, fed)
    others = [0, 1, 2, 4]
    assert not ours[3].isfinite().all()
    assert (ours[others] - usual[others]).norm() <= 1e-6 * usual[others].norm()
