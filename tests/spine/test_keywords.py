"""A call that does not bind says which argument is meant, for every public operator."""

from __future__ import annotations

import inspect

import pytest
import torch

import ops_math as om
from ops_math import ArgumentError
from ops_math.catalog import public_functions
from ops_math.keywords import MEANT, NEEDLESS

OPERATORS = (*public_functions(), "adamw")
x, q = torch.randn(4, 8), torch.randn(2, 6, 4, 8)
target = torch.zeros(4, dtype=torch.int64)

# What people who know PyTorch, Hugging Face or flash-attention write, and the end of the answer.
WRITTEN = [
    (lambda: om.attention(q, q, q, is_causal=True), "got is_causal. Write causal= for it."),
    (lambda: om.attention(q, q, q, attn_mask=None), "got attn_mask. Write mask= for it."),
    (lambda: om.attention(q, q, q, softmax_scale=1.0), "got softmax_scale. Write scale= for it."),
    (lambda: om.attention(q, q, q, p=0.1), "got p. Write dropout_p= for it."),
    (lambda: om.attention(q, q, q, enable_gqa=True), "Leave it out: fewer key heads than query heads are seen in the shapes."),
    (lambda: om.attention(query=q, key=q, value=q), "got query. Write q= for it."),
    (lambda: om.attention(q, q, q, casual=True), "got casual. Did you mean causal=?"),
    (lambda: om.attention(q, q, q, None),
     "attention: at most 3 positional arguments (q, k, v) may be given; got 4. Write what follows by name: causal="),
    (lambda: om.rms_norm(x, normalized_shape=(8,)), "got normalized_shape. The last dimension is meant: leave it out."),
    (lambda: om.rms_norm(input=x), "got input. Write x= for it."),
    (lambda: om.rms_norm(x, epsilon=1e-5), "got epsilon. Write eps= for it."),
    (lambda: om.rms_norm(x, dim=-1), "got dim. The last dimension is meant: leave it out."),
    (lambda: om.rms_norm(), "rms_norm: x must be given; got nothing. It takes rms_norm(x, weight=None, *, eps=1e-06, weight_offset=0.0)."),
    (lambda: om.rms_norm(x, (8,)),
     "weight must be a tensor; got tuple. There is no normalized_shape here, leave it out: the last dimension is meant."),
    (lambda: om.layer_norm(x, [8], None, None, 1e-5), "(x, weight, bias) may be given; got 5. Write what follows by name: eps=."),
    (lambda: om.layer_norm(x, None, weight=None),
     "layer_norm: weight must be given once; got it as argument 2 and by name. Leave one of the two out."),
    (lambda: om.add_layer_norm(x, x, p=0.1), "got p. Write dropout_p= for it."),
    (lambda: om.dropout(x, dropout_p=0.1), "got dropout_p. Write p= for it."),
    (lambda: om.dropout(x, p=0.1, training=True), "Leave it out: pass 0 for the probability, or do not call it, outside training."),
    (lambda: om.dropout(x), "dropout: p must be given; got nothing. It takes dropout(x, p, *, rng=None)."),
    (lambda: om.softmax(x, axis=-1), "got axis. Write dim= for it."),
    (lambda: om.softmax(x, dim=-1, dtype=torch.float32), "Leave it out; a result has the dtype of its input"),
    (lambda: om.cross_entropy(input=x, target=target), "got input. Write logits= for it."),
    (lambda: om.cross_entropy(x, target, weight=None), "got weight. Write class_weight= for it."),
    (lambda: om.cross_entropy(x, labels=target), "got labels. Write target= for it."),
    (lambda: om.cross_entropy(x, target, size_average=True), "got size_average. Write reduction= for it."),
    (lambda: om.gelu(x, aproximate="tanh"), "got aproximate. Did you mean approximate=?"),
    (lambda: om.swiglu(x), "swiglu: up must be given; got nothing. It takes swiglu(gate, up)."),
    (lambda: om.linear(x, x, None, (1, 1)), "Write what follows by name: parts=, wide=."),
    (lambda: om.adamw([], lr=1e-3), "It is stated in each ops_math.AdamWGroup; ops_nn.optim.AdamW takes PyTorch's arguments."),
    (lambda: om.rms_norm(x, qwertz=1), "got qwertz. See help(ops_math.rms_norm)."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRITTEN, ids=[str(i) for i in range(len(WRITTEN))])
def test_what_users_of_others_write_is_answered_with_the_argument_that_is_meant(call, words):
    with pytest.raises(ArgumentError) as found:
        call()
    assert words in str(found.value)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_names_its_arguments_for_an_unknown_one(name):
    function = getattr(om, name)
    with pytest.raises(ArgumentError) as found:
        function(qwertz=1)
    takes = ", ".join(inspect.signature(function).parameters)
    assert str(found.value) == f"{name}: keywords must be among {takes}; got qwertz. See help(ops_math.{name})."
    assert isinstance(found.value, TypeError)  # who catches Python's own answer catches this one


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_meant_exists(name):
    """A name of another library never stands for an argument that the operator lacks, and no own argument is called needless."""
    takes = inspect.signature(getattr(om, name)).parameters
    for written in {**MEANT, **NEEDLESS}:
        if written not in takes:
            with pytest.raises(ArgumentError) as found:
                getattr(om, name)(**{written: None})
            said = str(found.value).split(f"got {written}. ", 1)[1]
            assert not said.startswith("Write ") or said.split()[1].split("=")[0] in takes


def test_every_foreign_name_is_used_by_some_operator():
    takes = {n for name in OPERATORS for n in inspect.signature(getattr(om, name)).parameters}
    assert [n for n, meant in MEANT.items() if not set(meant) & takes] == []


def test_a_type_error_from_within_stays_what_it_is(monkeypatch):
    from ops_math.ops.softmax import op

    def broken(*_):
        raise TypeError("an int is not iterable")

    monkeypatch.setattr(op.checks, "floating", broken)
    with pytest.raises(TypeError, match="an int is not iterable") as found:
        om.softmax(x)
    assert not isinstance(found.value, ArgumentError)


def test_the_words_are_the_same_under_a_debugger_and_switched_off():
    with om.debug() as debugger, pytest.raises(ArgumentError, match="Write causal= for it"):
        om.attention(q, q, q, is_causal=True)
    debugger.off()
    with om.enabled(False), pytest.raises(ArgumentError, match="Write causal= for it"):
        om.attention(q, q, q, is_causal=True)


OF_ANOTHER_KIND = [
    (lambda: om.rms_norm(x, eps=None), "rms_norm: eps must be a number; got None. Leave it out for 1e-06."),
    (lambda: om.rms_norm(x, eps="1e-5"), "rms_norm: eps must be a number; got '1e-5'. Leave it out for 1e-06."),
    (lambda: om.rms_norm(x, weight_offset="1"), "rms_norm: weight_offset must be a number; got '1'. Leave it out for 0.0."),
    (lambda: om.dropout(x, "0.1"), "dropout: p must be a number; got '0.1'. It has no default."),
    (lambda: om.attention(q, q, q, scale="a"), "attention: scale must be a number or None; got 'a'. Leave it out for None."),
    (lambda: om.attention_qkv(q.flatten(2), num_heads="2"), "attention_qkv: num_heads must be a whole number; got '2'. It has no default."),
    (lambda: om.attention_qkv(torch.randn(1, 4, 48), num_heads=2.0), "num_heads must be a whole number; got 2.0. It has no default."),
    (lambda: om.cross_entropy(x, target, label_smoothing="a"), "label_smoothing must be a number; got 'a'. Leave it out for 0.0."),
    (lambda: om.cross_entropy(x, target, ignore_index=None), "ignore_index must be a whole number; got None. Leave it out for -100."),
    (lambda: om.cross_entropy(x, target, softcap="x"), "softcap must be a number or None; got 'x'. Leave it out for None."),
    (lambda: om.add_rms_norm(x, x, out_dtype="bf16"), "out_dtype must be torch's fp32, bf16, fp16 or fp64 or None; got 'bf16'."),
    (lambda: om.add_rms_norm(x, x, out_dtype=torch.int32), "out_dtype must be torch's fp32, bf16, fp16 or fp64 or None; got torch.int32."),
    (lambda: om.add_layer_norm(x, x, out_dtype=torch.float8_e5m2), "torch's fp32, bf16, fp16 or fp64 or None; got torch.float8_e5m2."),
    (lambda: om.linear(x, torch.randn(3, 8), parts=2), "linear: parts must be a pair of whole numbers; got 2. Leave it out for (1, 1)."),
    (lambda: om.linear(x, torch.randn(3, 8), parts=(2,)), "linear: parts must be a pair of whole numbers; got (2,)."),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), OF_ANOTHER_KIND, ids=[str(i) for i in range(len(OF_ANOTHER_KIND))])
def test_an_option_of_another_kind_is_named_with_what_it_needs(call, words):
    with pytest.raises(ArgumentError) as found:
        call()
    assert words in str(found.value)


def test_a_number_that_pytorch_takes_is_no_fault():
    assert torch.equal(om.attention(q, q, q, scale=torch.tensor(0.5)), om.attention(q, q, q, scale=0.5))
    assert torch.equal(om.rms_norm(x, eps=0), om.rms_norm(x, eps=0.0))


@pytest.mark.parametrize(("call", "words"), WRITTEN + OF_ANOTHER_KIND, ids=[str(i) for i in range(len(WRITTEN + OF_ANOTHER_KIND))])
def test_the_words_reach_the_user_of_a_compiler_that_may_not_leave_its_graph(call, words):
    """Dynamo binds arguments itself, and puts what was raised into its own message."""
    if "adamw" in call.__code__.co_names or "shape [" in words:
        return  # a step under a compiler is PyTorch's own
    with pytest.raises(torch._dynamo.exc.Unsupported) as found:
        torch.compile(call, backend="eager", fullgraph=True)()
    assert words.replace("'", '"') in str(found.value).replace("\\'", "'").replace("'", '"')


def test_a_call_that_binds_is_compiled_whole_with_every_way_of_giving_its_arguments():
    weight = torch.randn(8)
    for call in (lambda t: om.rms_norm(t, weight, eps=1e-5), lambda t: om.rms_norm(x=t, weight=weight), lambda t: om.rms_norm(t)):
        assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))
