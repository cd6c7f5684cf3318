"""Level 1 repeats, level 2 does not see how a batch is cut, and what cannot promise it raises in words. A planted fault of each kind is
caught."""

from __future__ import annotations

import re

import pytest
import torch

import ops_math as om
from ops_math import catalog, settings
from ops_math.checks import ArgumentError, UnsupportedError
from tests.determinism.calls import SAMPLES, differing, drawn, in_pieces, joined, outcome

CUTS = ([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [13], [1, 12], [5, 8], [3, 3, 7])
BLOCK = 16


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_at_level_one_a_call_gives_the_same_bits_every_time(sample):
    with om.determinism(1):
        given = drawn(sample, 13)
        first = outcome(sample, *given, 0)
        for _ in range(20):
            again = outcome(sample, *given, 0)
            assert [differing(a, b) for a, b in zip(first, again, strict=True)] == [[], [], []]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_at_level_two_outputs_and_input_gradients_do_not_depend_on_how_the_batch_is_cut(sample):
    with om.determinism(2):
        given = drawn(sample, 13)
        whole = outcome(sample, *given, 0)
        for cuts in CUTS:
            parts = joined(in_pieces(sample, cuts, *given))
            assert differing(whole.outputs, parts.outputs) == [], cuts
            assert differing(whole.inputs, parts.inputs) == [], cuts


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.shared(torch.Generator()) and s.name != "rope"], ids=lambda s: s.name)
def test_at_level_two_parameter_gradients_of_token_blocks_add_up_to_those_of_the_whole_batch(sample):
    with om.determinism(2, token_block=BLOCK):
        given = drawn(sample, 3 * BLOCK + 5)
        whole = outcome(sample, *given, 0)
        parts = joined(in_pieces(sample, [BLOCK, BLOCK, BLOCK, 5], *given))
        assert differing(whole.shared, parts.shared) == []
        uneven = joined(in_pieces(sample, [BLOCK + 3, 2 * BLOCK + 2], *given))
        assert differing(whole.shared, uneven.shared) != []  # cut elsewhere the order is another one: the test can see it


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_level_two_gives_the_values_of_level_zero_to_rounding(sample):
    given = drawn(sample, 13)
    free = outcome(sample, *given, 0)
    with om.determinism(2, token_block=BLOCK):
        bound = outcome(sample, *given, 0)
    for a, b in zip(free, bound, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.linalg.vector_norm(x - y) <= 1e-5 * torch.linalg.vector_norm(x)


def test_without_the_level_a_cut_changes_bits_somewhere_so_the_tests_can_fail():
    changed = []
    for sample in SAMPLES:
        given = drawn(sample, 13)
        whole = outcome(sample, *given, 0)
        for cuts in CUTS:
            parts = joined(in_pieces(sample, cuts, *given))
            if differing(whole.outputs, parts.outputs) or differing(whole.inputs, parts.inputs):
                changed.append(sample.name)
    assert changed


def test_a_sum_that_follows_the_rows_beside_it_is_caught():
    sample = next(s for s in SAMPLES if s.name == "rms_norm")
    operator = catalog.operators()["rms_norm"]
    eager = next(i for i in operator.implementations() if i.name == "eager")
    honest = eager.launcher("fwd")

    def neighbourly(p, config, x, residual, weight):
        y, total, rstd = honest(p, config, x, residual, weight)
        return y * (1 + 1e-7 * (p.rows % 3)), total, rstd

    levels = operator.file("levels").LEVELS
    eager.replaced["fwd"] = neighbourly
    operator.forget()
    try:
        with om.determinism(2):
            # Cut into single rows the fault cannot show; a launcher that is trusted with many rows shows it.
            operator.file("levels").LEVELS = levels._replace(pieces={})
            given = drawn(sample, 13)
            whole = outcome(sample, *given, 0)
            parts = joined(in_pieces(sample, [5, 8], *given))
            assert differing(whole.outputs, parts.outputs) == [0]
    finally:
        operator.file("levels").LEVELS = levels
        eager.replaced.clear()
        operator.forget()


def test_the_choice_at_level_two_does_not_follow_the_rows():
    seen = set()
    for size in (1, 7, 4096):
        om.reset_stats()
        with om.determinism(2):
            om.layer_norm(torch.randn(size, 64), torch.ones(64), torch.zeros(64))
        seen.add(tuple((r.op, r.implementation) for r in om.stats().rows))
    assert len(seen) == 1


def test_a_call_that_cannot_keep_the_level_names_the_operator_and_the_reason():
    x, w, t = torch.randn(4, 8), torch.randn(16, 8), torch.zeros(4, dtype=torch.long)
    with om.determinism(2):
        with pytest.raises(
            UnsupportedError,
            match=r"^linear_cross_entropy \(fwd\): no implementation can run it: .*eager: offers no "
            r"determinism level 2 for this problem \(its matrix products are a vendor library's, which promises level 1\)",
        ):
            om.linear_cross_entropy(x, w, t)
        with pytest.raises(
            UnsupportedError,
            match=r"^cross_entropy \(fwd\): .*a mean over the batch's own tokens follows the batch: pass "
            r"num_tokens=, or reduction='sum' or 'none'",
        ):
            om.cross_entropy(torch.randn(4, 8), t)
        om.cross_entropy(torch.randn(4, 8), t, num_tokens=torch.tensor(4))
    with om.determinism(3), pytest.raises(UnsupportedError, match=r"swiglu|glu.*a shard of the columns may differ"):
        om.swiglu(x, x)


def test_a_mean_by_a_given_count_is_the_sum_of_its_token_blocks():
    logits, target, count = torch.randn(40, 33), torch.randint(0, 33, (40,)), torch.tensor(40)
    with om.determinism(2, token_block=BLOCK):
        whole = om.cross_entropy(logits, target, num_tokens=count)
        parts = [om.cross_entropy(x, t, num_tokens=count) for x, t in zip(logits.split(BLOCK), target.split(BLOCK), strict=True)]
    assert torch.equal(whole, parts[0] + parts[1] + parts[2])


def test_a_document_gives_the_same_bits_in_any_company():
    g = torch.Generator().manual_seed(2)
    lengths = [5, 17, 1, 30]
    q, k, v = (torch.randn(sum(lengths), h, 16, generator=g) for h in (4, 2, 2))

    def run(documents):
        ends = torch.tensor([0, *torch.tensor([lengths[i] for i in documents]).cumsum(0).tolist()], dtype=torch.int32)
        leaves = [torch.cat([t.split(lengths)[i] for i in documents]).requires_grad_() for t in (q, k, v)]
        out = om.attention(*leaves, causal=True, cu_seqlens_q=ends)
        out.square().sum().backward()
        sizes = [lengths[i] for i in documents]
        return {i: [t.split(sizes)[n] for t in (out.detach(), *(leaf.grad for leaf in leaves))] for n, i in enumerate(documents)}

    with om.determinism(2):
        together = run([0, 1, 2, 3])
        for company in ([1], [3, 1], [2, 0], [0, 3, 2]):
            for i, tensors in run(company).items():
                assert differing(tensors, together[i]) == [], (company, i)


@pytest.mark.parametrize("degree", [2, 4])
def test_at_level_three_heads_on_several_ranks_give_the_bits_of_one(degree):
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 19, h, 16, generator=g) for h in (8, 4, 4))

    def run(*tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = om.attention(*leaves, causal=True)
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    with om.determinism(3):
        one = run(q, k, v)
        ranks = [run(*(t.chunk(degree, 2)[rank] for t in (q, k, v))) for rank in range(degree)]
    assert differing(one, [torch.cat(parts, 2) for parts in zip(*ranks, strict=True)]) == []


def test_dropout_in_attention_says_why_it_is_not_level_three():
    q = torch.randn(1, 4, 2, 8)
    with om.determinism(3), pytest.raises(UnsupportedError, match="a mask is drawn by the number of the head on its own rank"):
        om.attention(q, q, q, dropout_p=0.1, rng=om.Rng(1))


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("name", ["dropout", "attention", "layer_norm"])
def test_from_level_two_on_a_mask_without_a_key_is_refused_and_one_with_a_key_is_drawn(name, level):
    x, q = torch.randn(4, 8), torch.randn(1, 4, 2, 8)
    calls = {
        "dropout": lambda rng: om.dropout(x, 0.5, rng=rng),
        "attention": lambda rng: om.attention(q, q, q, dropout_p=0.5, rng=rng),
        "layer_norm": lambda rng: om.add_layer_norm(x, x, torch.ones(8), torch.zeros(8), dropout_p=0.5, rng=rng),
    }
    with om.determinism(1):
        calls[name](None)
    with om.determinism(level):
        with pytest.raises(
            ArgumentError,
            match=rf"^(add_)?{name}: rng must be given at determinism level {level}, where a mask may not follow the batch; got None\. "
            r"Pass om\.Rng\(key, device\), for a piece with at_row\(first row\); in a model attach an ops_nn\.SeedPool\.$",
        ):
            calls[name](None)
        if (name, level) != ("attention", 3):  # whose mask counts heads, so that level 3 is refused for its own reason
            calls[name](om.Rng(1))
    om.dropout(x, 0.0)


def test_a_level_or_token_block_that_is_none_is_refused():
    with pytest.raises(ArgumentError, match=re.escape("determinism: level must be one of 0, 1, 2, 3; got 5. Pick one of these.")):
        om.determinism(5)
    with pytest.raises(ArgumentError, match=r"^determinism: token_block must be a multiple of 16 above 0; got 100\. Pass the tokens"):
        om.determinism(2, token_block=100)
    assert settings.determinism_level() == 0


def test_a_refusal_names_the_call_as_it_was_made_and_what_to_do():
    """At level 2 the choice is made for a token block: what stands for the call is not what the user wrote."""
    x = torch.randn(4, 8)
    with om.determinism(2), pytest.raises(UnsupportedError) as error:
        om.cross_entropy(x, torch.zeros(4, dtype=torch.int64))
    assert "The problem was CrossEntropyProblem(rows=4, cols=8," in str(error.value)
    assert str(error.value).endswith("Ask for a lower level than 2, with determinism() around this call, or change what the reasons name.")
    with om.determinism(2), om.force(softmax="vendor"), pytest.raises(UnsupportedError) as error:
        om.softmax(x)
    assert "The problem was SoftmaxProblem(rows=4, cols=8," in str(error.value)
    assert str(error.value).endswith("Leave softmax out of force(), or change what the reasons name.")


def test_every_operator_states_its_levels_and_their_price():
    for name, operator in catalog.operators().items():
        levels = operator.file("levels").LEVELS
        assert levels.price, name
        for phase, cut in levels.cuts.items():
            assert len(cut.given) == operator.phases[phase].num_tensors, (name, phase)
            assert cut.made.count("+") == len(cut.sums), (name, phase)


def planted(name, phase, launcher):
    """Replace the CPU launcher of an operator; returns how to put it back."""
    operator = catalog.operators()[name]
    eager = next(i for i in operator.implementations() if i.name == "eager")
    honest = eager.launcher(phase)
    eager.replaced[phase] = lambda *args: launcher(honest, *args)
    operator.forget()

    def undo():
        eager.replaced.clear()
        operator.forget()

    return undo


def test_a_kernel_that_does_not_repeat_is_caught():
    calls = iter(range(10**6))
    sample = next(s for s in SAMPLES if s.name == "softmax")
    undo = planted("softmax", "fwd", lambda honest, *args: honest(*args) * (1 + 1e-6 * (next(calls) % 7 == 6)))
    try:
        with om.force(softmax="eager"), om.determinism(1):
            given = drawn(sample, 13)
            first = outcome(sample, *given, 0)
            found = [differing(first.outputs, outcome(sample, *given, 0).outputs) for _ in range(20)]
        assert [0] in found
    finally:
        undo()


def test_a_kernel_that_sees_how_many_documents_are_packed_is_caught():
    q, ends = torch.randn(9, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)

    def nosy(honest, p, config, *tensors):
        out, lse = honest(p, config, *tensors)
        return out * (1 + 1e-6 * p.documents), lse

    undo = planted("attention", "fwd", nosy)
    try:
        with om.determinism(2):
            together = om.attention(q, q, q, cu_seqlens_q=ends)
            alone = om.attention(q[:4], q[:4], q[:4], cu_seqlens_q=ends[:2])
        assert differing([together[:4]], [alone]) == [0]
    finally:
        undo()


def test_gradients_of_16_bit_parameters_are_summed_in_fp32_and_rounded_once():
    x, dy = torch.randn(3 * BLOCK, 65).bfloat16(), torch.randn(3 * BLOCK, 65).bfloat16()
    wide = torch.ones(65).requires_grad_()
    narrow = torch.ones(65).bfloat16().requires_grad_()
    with om.determinism(2, token_block=BLOCK):
        om.rms_norm(x, wide).backward(dy)
        om.rms_norm(x, narrow).backward(dy)
    assert narrow.grad.dtype == torch.bfloat16
    assert torch.equal(narrow.grad, wide.grad.bfloat16())


def test_an_operator_that_states_nothing_keeps_level_one_and_refuses_two():
    operator = catalog.operators()["softmax"]
    kept = [(i, i.levels_name) for i in operator.implementations()]
    x = torch.randn(3, 5)
    try:
        for implementation, _ in kept:
            implementation.levels_name, implementation._levels = "ops_math.ops.softmax.levels_of_nobody", None
        operator.forget()
        with om.determinism(1):
            om.softmax(x)
        with om.determinism(2), pytest.raises(UnsupportedError, match=r"eager: offers no determinism level 2 .*\(it states no more\)"):
            om.softmax(x)
    finally:
        for implementation, name in kept:
            implementation.levels_name, implementation._levels = name, None
        operator.forget()
