"""Every rule of the architecture is shown a file that breaks it and a like file that does not."""

from pathlib import PurePosixPath

import pytest

from tests.architecture import rules

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * rules.FUNCTION_LINES
LONG_KERNEL = "@triton.jit\ndef _fwd_kernel():\n" + "    x = 1\n" * rules.FUNCTION_LINES
DOCUMENTED_FUNCTION = 'def f():\n    """' + "words\n" * 100 + '"""\n    return 1\n'

ONLY_PUBLIC = rules.public_names_only({"rope", "testing"})

# rule, path, a text that breaks it, a text that does not
CASES = [
    (rules.layers, "ops_math/schedule/choose.py", "from ops_math.ops.rope import op", "from ops_math.spec import Cost"),
    (rules.layers, "ops_math/schedule/choose.py", "def f():\n    import ops_math.ops.rope", "def f():\n    import ops_math.backends.cuda"),
    (rules.layers, "ops_math/schedule/choose.py", "from ..ops import rope", "from ..backends import cuda"),
    (rules.layers, "ops_math/layout/plan.py", "from ops_math import catalog", "from ops_math import settings"),
    (rules.layers, "ops_math/testing/oracle.py", "from ops_math.catalog import operators", "from ops_math.dispatch import define"),
    (rules.layers, "ops_math/spec.py", "import ops_math", "import torch"),
    (rules.layers, "ops_math/brand_new.py", "", None),
    (rules.layers, "ops_math/ops/rope/op.py", "import ops_nn.modules", "import torch.nn"),
    (rules.operators_apart, "ops_math/ops/rope/eager.py", "from ops_math.ops.glu import eager", "from ops_math.ops.rope import problem"),
    (rules.operators_apart, "ops_math/ops/rope/eager.py", "from ..glu.eager import launch_fwd", "from .problem import Problem"),
    (rules.operators_apart, "ops_math/ops/rope/triton_gpu.py", "from ops_math.ops import glu", "from ops_math.ops._tiles import rope"),
    (rules.light_import, "ops_math/ops/rope/op.py", "import triton", "def f():\n    import triton"),
    (rules.light_import, "ops_math/schedule/record.py", "import msgspec", "def f():\n    import msgspec"),
    (rules.light_import, "ops_math/stats.py", "def f():\n    import rich", "import json"),
    (rules.light_import, "ops_math/stats.py", "try:\n    import triton\nexcept ImportError:\n    raise", "import torch.nn.functional as F"),
    (rules.environment_in_settings, "ops_math/backends/cuda.py", "import os\nx = os.environ['A']", "import os\nx = os.path.join('a')"),
    (rules.environment_in_settings, "ops_nn/debug/report.py", "import os\nx = os.getenv('A')", "# os.getenv('A')"),
    (rules.environment_in_settings, "ops_nn/debug/report.py", "from os import environ", "from os import path"),
    (rules.launches_in_one_place, "ops_math/ops/rope/triton_gpu.py", "_fwd_kernel[grid](x)", "launch(_fwd_kernel, grid, x)"),
    (rules.launches_in_one_place, "ops_math/ops/rope/triton_gpu.py", "import triton\nf[(1,)](x)", "f[(1,)](x)"),
    (rules.launches_in_one_place, "ops_math/schedule/calibrate.py", "k.run(x, grid=(1,))", "loop.run(x)"),
    (rules.errors_in_checks, "ops_math/ops/rope/op.py", "raise ValueError('no')", "checks.fail('rope', 'q', 'a', 'b', 'c')"),
    (rules.errors_in_checks, "ops_math/ops/rope/op.py", "raise TypeError", "try:\n    f()\nexcept ValueError:\n    raise"),
    (rules.errors_in_checks, "ops_math/blocks/residual.py", "raise checks.ArgumentError('no')", "checks.refuse('a', 'b', 'c')"),
    (rules.noted_copies, "ops_math/ops/rope/eager.py", "f(x.contiguous())", "f(dense(x, 'heads', 'they have strides'))"),
    (rules.noted_copies, "ops_math/blocks/mlp.py", "y = x.clone()", "y = copied(x.clone(), 'heads', 'they have strides')"),
    (rules.noted_copies, "ops_math/ops/linear/triton_gpu.py", "weight.contiguous()", "bias.contiguous()"),
    (rules.noted_copies, "ops_math/ops/rope/vendor.py", "x.clone(memory_format=f)", "x.is_contiguous()"),
    (rules.file_name, "ops_math/ops/rope/kernels.py", "", None),
    (rules.file_name, "ops_math/ops/rope/deep/op.py", "", None),
    (rules.file_name, "ops_math/schedule/utils.py", "", None),
    (rules.file_name, "ops_nn/common/walk.py", "", None),
    (rules.file_name, "ops_math/schedule/choose_v2.py", "", None),
    (rules.file_length, "ops_math/stats.py", "x = 1\n" * 421, "x = 1\n" * 420),
    (rules.file_length, "ops_math/ops/rope/triton_gpu.py", "x = 1\n" * 631, "x = 1\n" * 630),
    (rules.function_length, "ops_math/stats.py", LONG_FUNCTION, DOCUMENTED_FUNCTION),
    (rules.function_length, "ops_math/stats.py", LONG_KERNEL.replace("@triton.jit\n", ""), LONG_KERNEL),
    (rules.function_length, "ops_math/ops/rope/triton_gpu.py", LONG_KERNEL + "    x = 1\n" * 140, LONG_KERNEL),
    (ONLY_PUBLIC, "ops_nn/modules/rope.py", "from ops_math import spec", "from ops_math import rope"),
    (ONLY_PUBLIC, "ops_nn/modules/rope.py", "import ops_math.ops.rope.op", "import ops_math as om"),
    (ONLY_PUBLIC, "ops_nn/debug/locate.py", "from ops_math.rope import f", "from ops_math.testing import f"),
]


@pytest.mark.parametrize(("rule", "path", "bad", "good"), CASES)
def test_a_rule_finds_what_breaks_it_and_nothing_else(rule, path, bad, good):
    assert list(rule(rules.parse(path, bad))), f"not found in {bad[:80]!r}"
    if good is not None:
        assert list(rule(rules.parse(path, good))) == []


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in rules.FILE_RULES} <= {case[0].__name__ for case in CASES}


@pytest.mark.parametrize(
    "name",
    [
        "reference",
        "problem",
        "op",
        "eager",
        "vendor",
        "triton_gpu",
        "triton_gpu_bwd",
        "triton_ascend",
        "eager_fwd",
        "op_linear",
        "plain",
        "triton_gpu_linear_bwd",
        "test_rope",
        "__init__",
    ],
)
def test_the_fixed_file_names_of_an_operator_are_allowed(name):
    assert list(rules.file_name(rules.parse(f"ops_math/ops/rope/{name}.py", ""))) == []


def test_violations_say_where_and_what():
    (found,) = rules.environment_in_settings(rules.parse("ops_nn/debug/report.py", "import os\n\nx = os.getenv('A')\n"))
    assert str(found) == "ops_nn/debug/report.py:3: os.getenv: ask ops_math.settings"


def test_operator_folders_that_differ_from_the_catalogue_are_found():
    files = [PurePosixPath(f"ops_math/ops/rope/{stem}.py") for stem in (*rules.REQUIRED_FILES, "test_rope")]
    assert list(rules.operator_folders(files, ["rope"])) == []
    assert [v.message for v in rules.operator_folders(files, [])] == ["has a folder and no line in the catalogue"]
    assert [v.message for v in rules.operator_folders(files, ["rope", "glu"])] == ["has a line in the catalogue and no folder"]
    assert [v.message for v in rules.operator_folders(files[1:], ["rope"])] == ["has no reference.py"]
    assert [v.message for v in rules.operator_folders(files[:-1], ["rope"])] == ["has no test_rope.py"]
