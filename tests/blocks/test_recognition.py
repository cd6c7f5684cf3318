"""A module is known only while nothing observes, alters or replaces it; else it runs as it is, with the reason, and is never wrong."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import ops_math as om
from ops_math.blocks import parts
from tests.blocks.part_cases import ATTENTIONS, HAS_TRANSFORMERS, MLPS, SEQ, WIDTH, Setup, llama

needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers, which is not installed")
PLACES = ("", "q_proj", "o_proj")


@pytest.fixture(autouse=True)
def fresh_counters():
    om.reset_stats()


def attend(setup: Setup, x: torch.Tensor) -> torch.Tensor:
    return om.residual_attention(x, setup.norm, setup.module, **setup.kwargs)


def reasons() -> list[str]:
    return [row.fallback for row in om.stats().rows if row.phase == "block"]


def assert_runs_as_it_is(setup: Setup, reason: str) -> None:
    """The block gives the bits of the modules themselves, and says why."""
    x = setup.x(torch.float32)
    expected = setup.module(om.rms_norm(x, setup.norm.weight, eps=setup.norm.variance_epsilon), **setup.kwargs)
    om.reset_stats()
    assert torch.equal(attend(setup, x), x + expected)
    assert reasons() == [reason]
    assert om.part_of(setup.module) == om.PartReport(om.part_of(setup.module).kind, reason.split(": ", 1)[1])


def assert_fused(setup: Setup) -> None:
    om.reset_stats()
    attend(setup, setup.x(torch.float32))
    assert reasons() == []
    assert om.part_of(setup.module).fused


# The table


@pytest.mark.parametrize("name", parts.BY_CLASS)
def test_every_class_of_the_table_exists_or_belongs_to_a_library_that_is_missing(name):
    module, _, cls = name.rpartition(".")
    if name.startswith("transformers.") and not HAS_TRANSFORMERS:
        pytest.skip("needs transformers, which is not installed")
    if cls == "PytorchGELUTanh":  # its name before it became GELUTanh
        cls = "GELUTanh" if hasattr(importlib.import_module(module), "GELUTanh") else cls
    assert issubclass(getattr(importlib.import_module(module), cls), nn.Module)


def test_every_kind_of_the_table_is_named_once_and_its_children_are_kinds_of_the_table():
    assert len(parts.BY_KIND) == len(parts.TABLE)
    for part in parts.TABLE:
        for name, kinds in part.children:
            assert kinds, name
            assert all(kind in parts.BY_KIND for kind in kinds)
        assert set(part.optional) <= {name for name, _ in part.children}
        assert all(name in dict(part.children) for _, names in part.uses for name in names)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_of_the_cases_is_known(name):
    found = om.part_of(ATTENTIONS[name](torch.float32).module)
    assert found.fused, found.reason


@pytest.mark.parametrize("name", MLPS)
def test_every_mlp_of_the_cases_is_known(name):
    found = om.part_of(MLPS[name](torch.float32).module)
    assert found.fused, found.reason


def test_importing_and_using_the_blocks_does_not_import_transformers():
    code = (
        "import sys, torch, ops_math as om, ops_nn.adopt; from torch import nn;"
        "om.residual_mlp(torch.ones(2, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)));"
        "ops_nn.adopt.adopt(nn.Linear(2, 2)); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# What makes a module unknown


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_added_after_the_first_call_is_run_and_removed_again_the_module_is_known_again(place, kind):
    setup = llama(torch.float32, "attention")
    assert_fused(setup)
    seen: list[str] = []
    target = setup.module.get_submodule(place)
    handle = getattr(target, f"register_{kind}_hook")(lambda *args: seen.append(kind))
    words = kind.replace("full_", "").replace("_", " ") + " hooks"
    assert_runs_as_it_is(setup, f"LlamaAttention: {place or 'LlamaAttention'} has {words}")
    seen.clear()
    attend(setup, setup.x(torch.float32)).sum().backward()
    assert seen == [kind]
    handle.remove()
    assert_fused(setup)


def test_a_hook_that_changes_the_output_changes_the_blocks_output():
    setup = llama(torch.float32, "attention")
    x = setup.x(torch.float32)
    before = attend(setup, x)
    setup.module.v_proj.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    assert torch.equal(attend(setup, x), x)
    assert not torch.equal(before, x)


def test_a_hook_on_the_norm_is_run():
    setup = llama(torch.float32, "attention")
    seen: list[torch.Tensor] = []
    setup.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    attend(setup, setup.x(torch.float32))
    assert len(seen) == 1
    assert reasons() == ["norm: LlamaRMSNorm has forward hooks"]


def test_global_hooks_are_run():
    setup = llama(torch.float32, "attention")
    names: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: names.append(type(module).__name__))
    attend(setup, setup.x(torch.float32))
    handle.remove()
    assert names == ["LlamaRMSNorm", "Linear", "Linear", "Linear", "Linear", "LlamaAttention"]
    assert reasons() == ["LlamaAttention: global module hooks are set", "norm: global module hooks are set"]
    assert_fused(setup)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class OtherLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def _lora(setup: Setup) -> str:
    setup.module.q_proj = Lora(setup.module.q_proj)
    return "q_proj: Lora is not in the table of parts"


def _linear_of_another_class(setup: Setup) -> str:
    setup.module.v_proj = OtherLinear(WIDTH, 16)
    return "v_proj: OtherLinear is not in the table of parts"


def _parametrised(setup: Setup) -> str:
    parametrizations.weight_norm(setup.module.o_proj)
    return "o_proj: ParametrizedLinear is not in the table of parts"


def _weight_norm_of_old(setup: Setup) -> str:
    weight_norm(setup.module.o_proj)
    return "o_proj has forward pre hooks"


def _pruned(setup: Setup) -> str:
    prune.l1_unstructured(setup.module.k_proj, "weight", 0.5)
    return "k_proj has forward pre hooks"


def _own_forward(setup: Setup) -> str:
    plain = type(setup.module).forward
    setup.module.forward = lambda x, position_embeddings: -plain(setup.module, x, position_embeddings)
    return "LlamaAttention has a forward of its own, set on the instance"


def _own_forward_below(setup: Setup) -> str:
    setup.module.k_proj.forward = lambda x: F.linear(x, setup.module.k_proj.weight) * 3
    return "k_proj has a forward of its own, set on the instance"


def _buffer(setup: Setup) -> str:
    setup.module.q_proj.register_buffer("scale", torch.ones(()))
    return "q_proj has buffers: scale"


def _one_more_child(setup: Setup) -> str:
    setup.module.q_norm = nn.RMSNorm(8)
    return "q_norm is not part of a llama_attention"


def _tensor_subclass(setup: Setup) -> str:
    class Tagged(torch.Tensor):
        pass

    weight = setup.module.o_proj.weight.detach().as_subclass(Tagged)
    del setup.module.o_proj._parameters["weight"]
    setup.module.o_proj._parameters["weight"] = weight
    return "o_proj.weight is a Tagged, not a plain parameter"


def _compiled_on_its_own(setup: Setup) -> str:
    setup.module.q_proj.compile(backend="eager")
    return "q_proj was compiled on its own"


ALTERATIONS = (_lora, _linear_of_another_class, _parametrised, _weight_norm_of_old, _pruned, _own_forward, _own_forward_below, _buffer,
               _one_more_child, _tensor_subclass, _compiled_on_its_own)  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("alter", ALTERATIONS, ids=lambda f: f.__name__.strip("_"))
def test_an_altered_module_runs_as_it_is_from_the_next_call_on(alter):
    setup = llama(torch.float32, "attention")
    assert_fused(setup)
    assert_runs_as_it_is(setup, f"LlamaAttention: {alter(setup)}")


def test_a_class_whose_forward_is_replaced_runs_the_replacement_until_it_is_put_back(monkeypatch):
    setup = llama(torch.float32, "attention")
    assert_fused(setup)
    with monkeypatch.context() as patch:
        plain = type(setup.module).forward
        patch.setattr(type(setup.module), "forward", lambda self, x, position_embeddings: -plain(self, x, position_embeddings))
        assert_runs_as_it_is(setup, "LlamaAttention: the forward of LlamaAttention was replaced")
    with monkeypatch.context() as patch:
        linear = nn.Linear.forward
        patch.setattr(nn.Linear, "forward", lambda self, x: -linear(self, x))
        assert_runs_as_it_is(setup, "LlamaAttention: the forward of Linear was replaced")
    assert_fused(setup)


def test_a_subclass_is_not_its_parent_even_without_a_forward_of_its_own():
    setup = llama(torch.float32, "attention")
    setup.module.__class__ = type("MyAttention", (type(setup.module),), {})
    assert_runs_as_it_is(setup, "LlamaAttention: MyAttention is not in the table of parts".replace("LlamaAttention:", "MyAttention:"))


def test_a_class_of_a_known_name_from_elsewhere_is_unknown():
    class LlamaRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.randn(WIDTH)), 1e-6

        def forward(self, x):
            return F.rms_norm(x, (WIDTH,), 1 + self.weight, self.variance_epsilon)

    norm, mlp = LlamaRMSNorm(), nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))
    x = torch.randn(2, WIDTH)
    expected = x + mlp(norm(x))
    torch.testing.assert_close(om.residual_mlp(x, norm, mlp), expected)
    assert reasons() == ["norm: LlamaRMSNorm is not in the table of parts"]


KNOWN_SEQUENCES = "exactly Linear, GELU or ReLU, [Dropout,] Linear [, Dropout] is known"
UNKNOWN_MLPS = {
    f"Sequential holds Linear, Linear; {KNOWN_SEQUENCES}": nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)),
    f"Sequential holds Linear, Tanh, Linear; {KNOWN_SEQUENCES}": nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)),
    "Identity is not in the table of parts": nn.Identity(),
}


@pytest.mark.parametrize(("reason", "mlp"), UNKNOWN_MLPS.items(), ids=["no activation", "tanh", "identity"])
def test_an_mlp_that_is_not_in_the_table_runs_as_it_is(reason, mlp):
    norm, x = nn.LayerNorm(WIDTH), torch.randn(3, WIDTH)
    torch.testing.assert_close(om.residual_mlp(x, norm, mlp), x + mlp(norm(x)))
    assert reasons() == [f"{type(mlp).__name__}: {reason}"]


def test_a_sharded_weight_is_unknown():
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        setup = llama(torch.float32, "attention")
        mesh = init_device_mesh("cpu", (1,))
        setup.module.o_proj.weight = nn.Parameter(distribute_tensor(setup.module.o_proj.weight.detach(), mesh, [Replicate()]))
        assert om.part_of(setup.module).reason == "o_proj.weight.data is a DTensor, not a plain parameter".replace(".data", "")
    finally:
        dist.destroy_process_group()


def test_a_norm_over_two_dimensions_or_without_weights_is_what_it_was():
    mlp, x = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)), torch.randn(2, SEQ, WIDTH)
    wide = nn.LayerNorm((SEQ, WIDTH))
    torch.testing.assert_close(om.residual_mlp(x, wide, mlp), x + mlp(wide(x)))
    assert reasons() == [f"norm: it normalises over {(SEQ, WIDTH)}, not over the last dimension alone"]
    om.reset_stats()
    for norm in (
        nn.LayerNorm(WIDTH, elementwise_affine=False),
        nn.RMSNorm(WIDTH, elementwise_affine=False),
        nn.LayerNorm(WIDTH, bias=False),
    ):
        torch.testing.assert_close(om.residual_mlp(x, norm, mlp), x + mlp(norm(x)))
    assert reasons() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_without_eps_takes_the_one_that_pytorch_takes(dtype):
    norm = nn.RMSNorm(WIDTH, dtype=dtype)
    x = torch.full((1, WIDTH), 2.0**-12, dtype=dtype)
    torch.testing.assert_close(om.residual_norm(x, norm), norm(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_without_eps_takes_the_one_that_pytorch_takes_on_a_gpu(dtype):
    norm = nn.RMSNorm(WIDTH, dtype=dtype, device="cuda")
    x = torch.full((1, WIDTH), 2.0**-12, dtype=dtype, device="cuda")
    torch.testing.assert_close(om.residual_norm(x, norm), norm(x))


# Hugging Face


@needs_transformers
def test_gemmas_norm_is_never_taken_for_a_plain_one():
    import transformers

    config = transformers.GemmaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    layer = transformers.GemmaForCausalLM(config).model.layers[0]
    layer.input_layernorm.weight.data.normal_()
    x = torch.randn(2, SEQ, WIDTH)
    torch.testing.assert_close(om.residual_mlp(x, layer.input_layernorm, layer.mlp), x + layer.mlp(layer.input_layernorm(x)))
    assert reasons() == ["GemmaMLP: GemmaMLP is not in the table of parts", "norm: GemmaRMSNorm is not in the table of parts"]


@needs_transformers
@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"])
def test_a_function_replaced_in_the_modelling_file_is_used(name, monkeypatch):
    from transformers.models.llama import modeling_llama

    setup = ATTENTIONS["Hugging Face Llama"](torch.float32)
    assert_fused(setup)
    if name == "apply_rotary_pos_emb":
        monkeypatch.setattr(modeling_llama, name, lambda q, k, cos, sin: (q, k))
    else:
        registry = modeling_llama.ALL_ATTENTION_FUNCTIONS
        plain = registry.get_interface("sdpa", None)
        monkeypatch.setitem(registry._local_mapping, "sdpa", lambda *args, **kwargs: plain(*args, **kwargs))
    x = setup.x(torch.float32)
    torch.testing.assert_close(attend(setup, x), x + setup.module(setup.norm(x), **setup.kwargs)[0])
    assert reasons() == [f"LlamaAttention: {name} of transformers.models.llama.modeling_llama was replaced"]


@needs_transformers
@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"output_attentions": True}, "output_attentions is given"),
        ({"attention_mask": torch.ones(2, SEQ)}, "attention_mask is not a tensor of four dimensions"),
        ({"sliding": 3}, "keyword sliding is not read by the fused path"),
    ],
)
def test_a_keyword_that_the_fused_path_does_not_read_makes_the_module_run(keywords, reason):
    setup = ATTENTIONS["Hugging Face Llama"](torch.float32)
    x = setup.x(torch.float32)
    with contextlib.suppress(RuntimeError, ValueError):  # the module's own complaint about a mask of this shape
        ours = om.residual_attention(x, setup.norm, setup.module, **{**setup.kwargs, **keywords})
        torch.testing.assert_close(ours, x + setup.module(setup.norm(x), **{**setup.kwargs, **keywords})[0])
    assert reasons() == [f"LlamaAttention: {reason}"]


@needs_transformers
def test_an_attention_implementation_with_rules_of_its_own_runs_as_it_is():
    setup = ATTENTIONS["Hugging Face Llama"](torch.float32)
    setup.module.config._attn_implementation = "flex_attention"
    from ops_math.blocks import attention, recognise

    found = attention.read(recognise.kind_of(setup.module), setup.module, setup.kwargs, setup.x(torch.float32))
    assert found == "attention implementation 'flex_attention' has rules of its own"
