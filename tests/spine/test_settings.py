"""Switches work as statements and as contexts, and the environment is read late and once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ops_math as om
from ops_math import catalog, features, settings
from ops_math.checks import ArgumentError
from ops_math.schedule.live import LIVE

SOURCE = str(Path(__file__).parents[2] / "src")


def run_python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": SOURCE, **environment}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() + done.stderr


@pytest.fixture
def products():
    """PyTorch's settings of fp32 products are put back."""
    yield torch.backends
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    assert torch.get_float32_matmul_precision() == "highest"


def test_pytorchs_newer_settings_of_fp32_products_are_followed_and_stop_no_call(products):
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    for setting, mode in (("tf32", "tf32"), ("ieee", "ieee")):
        products.cuda.matmul.fp32_precision = setting
        assert settings.fp32_products() == mode
        for _ in range(3):
            om.rms_norm(om.linear(x, w)).sum().backward()
    products.mkldnn.matmul.fp32_precision = "bf16"  # of CPUs alone
    assert settings.fp32_products() == "ieee"
    om.attention(*x.view(1, 4, 1, 8).expand(3, 1, 4, 1, 8).unbind()).sum().backward()
    products.fp32_precision = "tf32"
    products.cuda.matmul.fp32_precision = "none"
    assert settings.fp32_products() == "tf32"


def test_a_newer_setting_that_contradicts_the_older_wins_as_in_pytorch(products):
    torch.set_float32_matmul_precision("high")
    assert settings.fp32_products() == "tf32"
    products.cuda.matmul.fp32_precision = "ieee"
    assert settings.fp32_products() == "ieee"


@pytest.mark.parametrize("older", ["highest", "high", "medium"])
def test_settings_of_fp32_products_are_carried_to_another_process(older, products):
    torch.set_float32_matmul_precision(older)
    found = features.products()
    torch.set_float32_matmul_precision("highest")
    features.set_products(found)
    assert torch.get_float32_matmul_precision() == older
    products.cuda.matmul.fp32_precision, products.mkldnn.matmul.fp32_precision = "tf32", "ieee"
    found = features.products()
    torch.set_float32_matmul_precision("highest")
    features.set_products(found)
    assert (features.products(), settings.fp32_products()) == (found, "tf32")


def test_enabled_as_a_context_restores_what_was_before():
    assert settings.active()
    with om.enabled(False):
        assert not settings.active()
        with om.enabled(True):
            assert settings.active()
        assert not settings.active()
    assert settings.active()


def test_enabled_as_a_statement_holds_until_changed():
    om.enabled(False)
    try:
        assert not settings.active()
    finally:
        om.enabled(True)
    assert settings.active()


def test_switched_off_it_is_plain_pytorch_to_the_bit():
    x, w = torch.randn(5, 64), torch.randn(64)
    with om.enabled(False):
        om.reset_stats()
        y = om.rms_norm(x, w)
        assert om.stats().rows == ()
    assert torch.equal(y, torch.nn.functional.rms_norm(x, (64,), w, 1e-6))


def test_force_names_the_implementation_and_statistics_show_it():
    om.reset_stats()
    with om.force(rms_norm="eager"):
        om.rms_norm(torch.randn(3, 8))
    (row,) = om.stats().rows
    assert (row.op, row.phase, row.implementation, row.calls, row.reason) == ("rms_norm", "fwd", "eager", 1, "asked for by force()")
    assert row.bytes > 2 * 3 * 8 * 4


def test_a_bad_value_is_refused_with_the_choices():
    with pytest.raises(ArgumentError, match=r"precision: mode must be one of 'default', 'ieee', 'tf32'; got 'fast'"):
        om.precision("fast")
    with pytest.raises(ArgumentError, match=r"determinism: level must be one of 0, 1, 2, 3; got 4"):
        om.determinism(4)


def test_the_environment_switches_it_off():
    code = "import ops_math as om, torch; om.rms_norm(torch.ones(2, 4)); print(len(om.stats().rows))"
    assert run_python(code, OPS_MATH_ENABLED="0") == "0"
    assert run_python(code) == "1"


def test_arguments_win_over_the_environment():
    code = "import ops_math as om, torch; om.enabled(True); om.rms_norm(torch.ones(2, 4)); print(len(om.stats().rows))"
    assert run_python(code, OPS_MATH_ENABLED="0") == "1"


def test_a_bad_environment_variable_is_named():
    assert "OPS_MATH_DETERMINISM must be one of '0', '1', '2', '3'; got 'yes'" in run_python(
        "import ops_math as om, torch; om.rms_norm(torch.ones(2, 4))", OPS_MATH_DETERMINISM="yes"
    )


def test_pytorchs_own_switch_means_level_one():
    torch.use_deterministic_algorithms(True)
    try:
        assert settings.determinism_level() == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert settings.determinism_level() == 0


def test_a_context_that_has_ended_is_not_entered_again_in_silence():
    made = (
        lambda: om.force(rms_norm="eager"),
        lambda: om.enabled(False),
        lambda: om.precision("ieee"),
        lambda: om.determinism(1),
        lambda: om.schedule.freeze(),
    )
    for make in made:
        before = settings.policy(), settings.active(), LIVE.frozen
        context = make()
        with context:
            assert (settings.policy(), settings.active(), LIVE.frozen) != before
        with (
            pytest.raises(om.UnsupportedError, match=r": this context has ended, and entering it again sets nothing\. Make another"),
            context,
        ):
            pass
        assert (settings.policy(), settings.active(), LIVE.frozen) == before


@pytest.mark.parametrize("options", [{"level": True}, {"level": 2.0}, {"level": 2, "token_block": 64.0}], ids=str)
def test_levels_and_token_blocks_are_whole_numbers(options):
    with pytest.raises(ArgumentError, match=r"^determinism: (level|token_block) must be "):
        om.determinism(**options)


MADE = {
    "force": lambda: om.force(softmax="eager"),
    "enabled": lambda: om.enabled(False),
    "precision": lambda: om.precision("ieee"),
    "determinism": lambda: om.determinism(2),
    "freeze": lambda: om.schedule.freeze(),
}


def in_force():
    return settings.policy(), settings.active(), LIVE.frozen, torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_setting_as_a_decorator_is_refused_and_not_left_in_force(make):
    before = in_force()
    with pytest.raises(TypeError, match=r": it is a setting and no decorator\. Write `with` inside the function"):
        make()(len)
    assert in_force() == before


@pytest.mark.parametrize("name", [name for name in MADE if name != "enabled"])
def test_a_setting_inside_compiled_code_is_in_force_or_refused(name, monkeypatch):
    seen, x, operator = [], torch.randn(1, 3), catalog.operators()["softmax"]
    for module in (i.module for i in operator.implementations() if i.name in ("eager", "vendor")):
        launcher = module.launch_fwd

        def watched(*args, launcher=launcher):
            seen.append(in_force())
            return launcher(*args)

        monkeypatch.setattr(module, "launch_fwd", watched)

    def step(x):
        with MADE[name]():
            return om.softmax(x)

    before = in_force()
    operator.forget()
    step(x)
    torch._dynamo.reset()
    torch.compile(step, backend="eager")(x)
    assert len(seen) == 2
    assert seen[0] == seen[1] != before
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"in a function that is compiled it would have no effect\. Set it around the call"):
        torch.compile(step, backend="eager", fullgraph=True)(x)
    assert in_force() == before
    monkeypatch.undo()
    operator.forget()
