"""The likely cause in words, for each kind that has a rule and is not among the broken models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops_nn.debug import ConsistencyChecker
from tests.debug.broken import run


class Line(nn.Module):
    """An embedding-like start, one module under test, and a loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.start, self.module_ = nn.Linear(16, 16), module

    def forward(self, x):
        return (self.module_(self.start(x)) * torch.linspace(-1, 2, 16)).square().mean()


class Turned(nn.Linear):
    def forward(self, x):
        return super().forward(x).flip(1).contiguous()


class Negative(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


class FineSum(nn.Linear):
    """Sums in another order."""

    def forward(self, x):
        halves = F.linear(x[..., :5], self.weight[:, :5]) + F.linear(x[..., 5:], self.weight[:, 5:])
        return halves + self.bias


class Blind(nn.Linear):
    def forward(self, x):
        y = super().forward(x).clone()
        y[:, -1] = 0.0
        return y


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())


def eps(module: nn.Module) -> None:
    module.eps = 1e-3


def eps_inside(module: nn.Module) -> None:
    weight, bias = module.weight, module.bias
    module.forward = lambda x: F.layer_norm(x, (16,), weight, bias, 1e-3)


def turn_into(cls: type) -> object:
    def change(module: nn.Module) -> None:
        module.__class__ = cls

    return change


def other_weight(module: nn.Module) -> None:
    with torch.no_grad():
        module.weight[3, 4] += 0.01


def reseed(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda m, args: torch.manual_seed(77) and None)


CASES = {
    "layout": (lambda: nn.Linear(16, 16), turn_into(Turned), "layout", "forward"),
    "sign": (lambda: nn.Linear(16, 16), turn_into(Negative), "sign", "forward"),
    "mask": (lambda: nn.Linear(16, 16), turn_into(Blind), "mask", "forward"),
    "reduction order": (lambda: nn.Linear(16, 16), turn_into(FineSum), "reduction order", "forward"),
    "cut gradient": (lambda: nn.Linear(16, 16), turn_into(Detached), "cut gradient", "input gradient"),
    "other weights": (lambda: nn.Linear(16, 16), other_weight, "other weights", "forward"),
    "eps, as the module says": (lambda: nn.LayerNorm(16), eps, "eps", "forward"),
    "eps, as the rows say": (lambda: nn.LayerNorm(16, bias=False), eps_inside, "eps", "forward"),
    "random stream": (lambda: nn.Dropout(0.5), reseed, "random stream", "forward"),
    "setting": (lambda: nn.Dropout(0.5), lambda m: m.eval(), "setting", "forward"),
    "approximation": (nn.GELU, lambda m: setattr(m, "approximate", "tanh"), "approximation", "forward"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_likely_cause_is_named(name):
    make, change, kind, direction = CASES[name]
    torch.manual_seed(3)
    a = Line(make())
    b = copy.deepcopy(a)
    change(b.module_)
    x = torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(2))
    checker = ConsistencyChecker(precision=1e-8 if kind == "reduction order" else 1e-6, mode="full", dump_on_failure=False)
    traces = []
    for model in (a, b):
        torch.manual_seed(5)
        traces.append(run(checker, model, lambda m: m(x)))
    report = checker.compare(traces[1], trace=traces[0])
    assert (report.first.module, report.first.direction) == ("module_", direction), str(report)
    assert report.first.cause.kind == kind, str(report)


def traced(model: nn.Module, x: torch.Tensor):
    return run(ConsistencyChecker(mode="full"), model, lambda m: m(x).square().sum())


def layers(*more: nn.Module, middle: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), middle or nn.GELU(), nn.Linear(8, 4), *more)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            lambda: layers(middle=nn.ReLU()),
            "another module: 1 is torch.nn.modules.activation.GELU in A and torch.nn.modules.activation.ReLU in B",
        ),
        (lambda: layers(nn.Linear(4, 4)), "another module: 3 (torch.nn.modules.linear.Linear) is in B only"),
        (lambda: layers()[:2], "another module: 2 (torch.nn.modules.linear.Linear) is in A only"),
    ],
)
def test_a_module_of_another_class_and_one_that_a_model_has_not_are_named(other, words):
    x = torch.randn(3, 8)
    report = ConsistencyChecker().compare(traced(other(), x), trace=traced(layers(), x))
    assert str(report.first.cause) == words


@pytest.mark.parametrize("batch", [lambda x: torch.randn(3, 8), lambda x: torch.randn(5, 8), lambda x: x.flip(0), lambda x: x + 1e-3])
def test_another_batch_of_numbers_is_said_before_all_else(batch):
    x = torch.randn(3, 8)
    report = ConsistencyChecker().compare(traced(layers(), batch(x)), trace=traced(layers(), x))
    words = "first of all: data: the model was given another input 0: another batch, or another order of the data"
    assert words in str(report).splitlines()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_input_in_another_dtype_is_no_other_batch(dtype):
    x = torch.randn(3, 8)
    report = ConsistencyChecker().compare(traced(layers().to(dtype), x.to(dtype)), trace=traced(layers(), x))
    assert report.given is None
