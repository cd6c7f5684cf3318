from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ops_math as om
from ops_math import catalog
from ops_math.ops.cross_entropy import eager, problem, reference
from ops_math.testing import Fault, conformance, planted

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


# Digits that one logsumexp a row would lose


FAR = {"around 1000": (1000.0, False), "around -1000": (-1000.0, False), "sure": (0.0, True), "sure, around 1000": (1000.0, True)}
FEW_ROUNDINGS = 2e-6  # of a row's gradient or loss: some 20 units of fp32, for exponentials of up to 30 and their sums


def far_logits(kind, classes, rows=6):
    """fp32 logits around an offset; where sure, each target's probability is within 1e-5 of 1."""
    offset, sure = FAR[kind]
    generator = torch.Generator().manual_seed(classes)
    z, target = torch.randn(rows, classes, generator=generator), torch.randint(0, classes, (rows,), generator=generator)
    if sure:
        z.scatter_(1, target[:, None], math.log(classes) + 12.5)
    return z + offset, target


def exact(logits, target):
    """Losses [rows] and their gradients in float64, with the other classes' share summed rather than subtracted from 1."""
    z, index = logits.double(), target[:, None]
    others = torch.logsumexp(z.scatter(1, index, float("-inf")), 1, keepdim=True)
    behind = others - z.gather(1, index)
    loss = torch.logaddexp(behind, torch.zeros_like(behind))
    return loss[:, 0], torch.softmax(z, 1).scatter(1, index, -torch.sigmoid(behind))


def too_wrong(fn, logits, target):
    """Rows whose loss or gradient errs by more than a few roundings, as numbers."""
    leaf = logits.clone().requires_grad_()
    loss = fn(leaf, target)
    (dlogits,) = torch.autograd.grad(loss.sum(), leaf)
    want, want_dlogits = exact(logits, target)
    errors = (loss.double() - want).abs() / want, (dlogits.double() - want_dlogits).norm(dim=1) / want_dlogits.norm(dim=1)
    return [e.max().item() for e in errors if not e.max() <= FEW_ROUNDINGS]


def unreduced(logits, target):
    return om.cross_entropy(logits, target, reduction="none")


@pytest.mark.parametrize("classes", [2, 200, 4501])
@pytest.mark.parametrize("kind", FAR)
@pytest.mark.parametrize("implementation", ["eager", "vendor"])
def test_far_logits_and_sure_rows_keep_all_digits_of_loss_and_gradient(implementation, kind, classes):
    logits, target = far_logits(kind, classes)
    if "sure" in kind:
        assert exact(logits, target)[0].max() < 1e-5
    with om.force(cross_entropy=implementation):
        assert too_wrong(unreduced, logits, target) == []


def test_the_check_for_lost_digits_sees_one_logsumexp_a_row():
    class OneNumber(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, target):
            lse = torch.logsumexp(logits, 1)
            ctx.save_for_backward(logits, target, lse)
            return lse - logits.gather(1, target[:, None])[:, 0]

        @staticmethod
        def backward(ctx, dloss):
            logits, target, lse = ctx.saved_tensors
            p = torch.exp(logits - lse[:, None])
            return p.scatter_add(1, target[:, None], -torch.ones(len(target), 1)), None

    for kind in FAR:
        assert len(too_wrong(OneNumber.apply, *far_logits(kind, 200))) == 2


def one_logsumexp(launcher):
    """The backward from a single number a row, as fp32 rounds it."""

    def faulty(problem, config, dloss, logits, target, class_weight, factors, divisor):
        index = target.reshape(-1, 1).clamp_min(0)
        z = eager.capped(problem, logits.reshape(len(index), -1), factors.dtype)
        weight = 1.0 if class_weight is None else class_weight[index[:, 0]]
        lse = torch.logsumexp(z, 1)
        on_p = factors[:, 1] * torch.exp(lse - factors[:, 0])
        on_target = on_p * torch.exp(z.gather(1, index)[:, 0] - lse) - (1 - problem.label_smoothing) * weight
        one = torch.stack((lse, on_p, on_target), 1)
        return launcher(problem, config, dloss, logits, target, class_weight, one, divisor)

    return faulty


# Far logits alone do not show it there: the budget allows what one unit of a logit of 1,000 moves, which is as much.
SURE_CASES = [
    c for c in problem.CASES if c.name.startswith("confident, 1 - 1e-5") or c.name.endswith((", confident", "confident, class weights"))
]


@pytest.mark.parametrize("case", SURE_CASES, ids=lambda c: c.name)
def test_the_budget_of_sure_rows_catches_one_logsumexp_a_row(case):
    operator = catalog.operators()["cross_entropy"]
    for implementation in ("eager", "vendor"):
        if conformance.able(operator, case, "fp32", implementation, "cpu") is None:
            assert conformance.check_budget(operator, case, "fp32", implementation) == []
            with planted(operator, implementation, Fault("one logsumexp a row", "bwd", one_logsumexp)):
                assert conformance.check_budget(operator, case, "fp32", implementation) != []


def test_smoothing_keeps_the_digits_of_losses_far_from_zero():
    logits, target = far_logits("around 1000", 200)
    weight = torch.rand(200, generator=torch.Generator().manual_seed(1))
    for options in ({"label_smoothing": 0.3}, {"label_smoothing": 1.0}, {"label_smoothing": 0.3, "class_weight": weight}):
        want = reference.cross_entropy(logits.double(), target, reduction="none", **options)
        loss = om.cross_entropy(logits, target, reduction="none", **options)
        assert ((loss.double() - want).abs() / want).max() < FEW_ROUNDINGS


INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
import ops_math as om
from ops_math import catalog
from ops_math.ops.cross_entropy import triton_gpu_linear as linear
from ops_math.ops.cross_entropy.test_cross_entropy import FAR, far_logits, too_wrong, unreduced
torch.set_num_threads(1)
om.force(cross_entropy="triton_gpu", linear_cross_entropy="triton_gpu")
found = []
for kind in FAR:
    for classes in (200, 4501, 4512):
        found += [f"{kind}, {classes}: {e}" for e in too_wrong(unreduced, *far_logits(kind, classes, rows=3))]
    logits, target = far_logits(kind, 64, rows=3)
    for config in (linear.Config(16, 64, 8, True, 32, 4), linear.Config(16, 32, 8, False, 64, 4)):
        linear.configs = lambda p, device, phase, config=config: (config,)
        catalog.operators()["linear_cross_entropy"].forget()
        for options in ({}, {"recompute": True}):
            summed = lambda x, y: om.linear_cross_entropy(x, torch.eye(64), y, reduction="sum", **options)
            for row in range(3):
                one = slice(row, row + 1)
                found += [f"{kind}, {config}, {options}: {e}" for e in too_wrong(summed, logits[one], target[one])]
print("\\n".join(found) or "none")
"""


@pytest.mark.interpreter
def test_the_kernels_keep_the_digits_of_far_logits_and_sure_rows_too():
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    environment = {**os.environ, "PYTHONPATH": str(Path(om.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert answer.stdout.strip() == "none", answer.stdout + answer.stderr[-2000:]


@pytest.mark.parametrize("implementation", ["eager", "vendor"])
def test_what_is_saved_of_an_ignored_row_is_the_same_whoever_saves_it(implementation):
    operator = catalog.operators()["cross_entropy"]
    launcher = next(i for i in operator.implementations() if i.name == implementation).launcher("fwd")
    logits, target = torch.randn(4, 9), torch.tensor([3, -100, 0, -100])
    logits[1] = 1e4
    p = operator.phases["fwd"].problem_of(logits, target, None, None, -100, 0.0, 0.0, 0.0, "mean")
    factors = launcher(p, None, logits, target, None, None)[1]
    assert factors[1::2].tolist() == [[math.inf, 0.0, 0.0]] * 2
    assert torch.isfinite(factors[::2]).all()


@pytest.mark.parametrize("off", [0, 1, 3])
def test_logits_in_memory_of_another_library_start_anywhere(off, monkeypatch):
    pytest.importorskip("triton", reason="missing capability: Triton")
    from ops_math.ops.cross_entropy import triton_gpu_unaligned as unaligned

    seen = []
    monkeypatch.setattr(unaligned, "launch", lambda kernel, grid, *args, **constants: seen.append(args))
    logits = torch.from_dlpack(torch.randn(3 * 5001 + 8)[off : off + 3 * 5001].view(3, 5001))
    assert (logits.storage_offset(), logits.data_ptr() % 16) == (0, 4 * off)
    unaligned.launch_rows(5001, logits, torch.zeros(3, dtype=torch.int64), (logits,) * 5, (), {}, 2048, 4)
    ((base, *_, num_cols, first, stride),) = seen
    assert base.data_ptr() % 16 == 0
    assert torch.equal(base.as_strided((3, num_cols), (stride, 1), base.storage_offset() + first), logits)
