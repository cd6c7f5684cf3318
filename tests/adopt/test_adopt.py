"""adopt(model): the same loss and gradients, less memory, nothing else changed, and everything put back."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

import ops_math as om
from ops_nn.adopt import adopt, head
from tests.adopt.models import HAS_TRANSFORMERS, JOBS, bert, deep, gradients, hugging_face, llama

each_job = pytest.mark.parametrize("name", JOBS)
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers, which is not installed")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def layers_of(job) -> int:
    return sum(type(m).__name__.endswith(("DecoderLayer", "BertLayer", "EncoderLayer")) for m in job.model.modules())


@each_job
def test_loss_and_every_gradient_stay_the_same_in_float64(name):
    job = deep(JOBS[name]())
    before = gradients(job)
    adoption = adopt(job.model)
    assert all(row.fused for row in adoption.report), str(adoption)
    om.reset_stats()
    after = gradients(job)
    assert not [row for row in om.stats().rows if row.phase == "block"], str(om.stats())
    assert sum(row.calls for row in om.stats().rows if row.op == "attention" and row.phase == "bwd") == layers_of(job)
    assert after.keys() == before.keys()
    # Our baselines compute their loss in fp32, and Hugging Face its norms, whatever the dtype.
    tolerance = 1e-11 if name.startswith("Transformer") else 3e-6
    largest = max(float(g.norm()) for g in before.values())
    for key, value in before.items():
        assert (after[key] - value).norm() <= tolerance * max(float(value.norm()), 1e-3 * largest), key


@each_job
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
def test_errors_stay_as_large_as_the_plain_model_makes_them(name, mode):
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    job = JOBS[name]()
    job.model.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        plain = gradients(job)
        with adopt(job.model):
            ours = gradients(job)
    exact = gradients(deep(job))
    floor = torch.finfo(torch.float32 if mode == "fp32" else torch.bfloat16).eps
    # Some gradients (of the key's bias) are zero but for rounding: they are compared with a fiftieth of the largest.
    largest = max(float(g.norm()) for g in exact.values())
    scales = {key: max(float(r.norm()), 2e-2 * largest) for key, r in exact.items()}
    errors = {key: [float((e[key].double() - r).norm()) / scales[key] for e in (ours, plain)] for key, r in exact.items()}
    worst = {key: e for key, e in errors.items() if e[0] > 2.0 * e[1] + floor}
    assert not worst, worst


@each_job
def test_revert_puts_back_every_bit(name):
    job = JOBS[name]()
    names = list(job.model.state_dict())
    dicts = {path: set(module.__dict__) for path, module in job.model.named_modules()}
    before = gradients(job)
    adoption = adopt(job.model)
    gradients(job)
    assert list(job.model.state_dict()) == names
    assert adoption.revert() is job.model
    assert {path: set(module.__dict__) for path, module in job.model.named_modules()} == dicts
    after = gradients(job)
    assert all(torch.equal(after[key], value) for key, value in before.items())


@each_job
def test_switched_off_an_adopted_model_is_the_plain_one_bit_for_bit(name):
    job = JOBS[name]()
    before = gradients(job)
    adopt(job.model)
    om.reset_stats()
    with om.enabled(False):
        after = gradients(job)
    assert om.stats().rows == ()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@each_job
def test_what_is_saved_for_the_backward_shrinks(name):
    job = JOBS[name]()

    def saved() -> int:
        storages: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            kept.append(t)
            return t

        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = job.loss(job.model)
        held = {p.untyped_storage().data_ptr() for p in job.model.parameters()}
        del loss
        return sum(size for pointer, size in storages.items() if pointer not in held)

    before = saved()
    adopt(job.model)
    assert saved() < 0.95 * before


@each_job
def test_a_deep_copy_is_adopted_and_separate(name):
    job = JOBS[name]()
    adopt(job.model)
    twin = copy.deepcopy(job.model)
    swapped = [m for m in twin.modules() if "forward" in m.__dict__]
    assert len(swapped) == job.swapped
    assert all(m.forward.__self__ is m for m in swapped)
    ours = gradients(job)
    theirs = gradients(job, twin)
    assert all(torch.equal(theirs[key], value) for key, value in ours.items())


@each_job
def test_signatures_stay_and_modes_are_followed(name):
    job = JOBS[name]()
    signatures = {path: inspect.signature(m.forward) for path, m in job.model.named_modules()}
    adopt(job.model)
    for path, module in job.model.named_modules():
        now, before = inspect.signature(module.forward), signatures[path]
        assert list(now.parameters)[: len(before.parameters)] == list(before.parameters)
        assert all(p.default is not inspect.Parameter.empty for n, p in now.parameters.items() if n not in before.parameters)
    job.model.eval()
    with torch.no_grad():
        in_evaluation = job.loss(job.model)
        with om.enabled(False):
            plain = job.loss(job.model)
    assert relative(in_evaluation, plain) < 1e-5


def test_logits_are_not_made_in_training_and_are_there_otherwise():
    job = llama()
    ids = torch.randint(61, (2, 12))
    plain = job.model(ids).logits
    adopt(job.model)
    assert job.model(ids, ids).logits is None
    assert relative(job.model(ids).logits, plain) < 1e-5
    job.model.eval()
    assert relative(job.model(ids, ids).logits, plain) < 1e-5


def test_a_pickled_adopted_model_comes_back_plain():
    job = llama()
    before = gradients(job)
    adopt(job.model)
    twin = pickle.loads(pickle.dumps(job.model))
    after = gradients(job, twin)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_hook_on_a_layer_sees_the_whole_residual_stream():
    job = llama()
    seen: dict[str, list[torch.Tensor]] = {"plain": [], "adopted": []}
    for key in seen:
        handles = [layer.register_forward_hook(lambda m, a, y, key=key: seen[key].append(y)) for layer in job.model.model.layers]
        before = gradients(job)
        for handle in handles:
            handle.remove()
        adopt(job.model)
    assert len(seen["adopted"]) == 3
    assert all(isinstance(y, torch.Tensor) and relative(y, r) < 1e-5 for y, r in zip(seen["adopted"], seen["plain"], strict=True))
    assert before


def test_a_global_hook_sees_tensors_between_layers():
    job = llama()
    adopt(job.model)
    seen: list[object] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(output) if "DecoderLayer" in type(module).__name__ else None
    )
    job.loss(job.model)
    handle.remove()
    assert len(seen) == 3
    assert all(isinstance(y, torch.Tensor) for y in seen)


def test_sums_between_layers_are_fused_and_a_layer_alone_returns_a_tensor():
    job = llama()
    adopt(job.model)
    om.reset_stats()
    gradients(job)
    norms = [row for row in om.stats().rows if row.op == "rms_norm" and row.phase == "fwd"]
    assert sum(row.calls for row in norms) == 7
    assert sum(row.calls for row in norms if "residual=''" not in row.problem) == 6 or len(norms) == 1
    model = job.model.model
    x = model.embed_tokens(torch.randint(61, (2, 12)))
    assert isinstance(model.layers[0](x, position_embeddings=model.rotary_emb(x)), torch.Tensor)


def test_activation_checkpointing_around_layers_gives_the_same_bits():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    job = llama()
    adopt(job.model)
    with_sums_in_layers = None
    for wrap in (False, True):
        if wrap:
            for i, layer in enumerate(job.model.model.layers):
                job.model.model.layers[i] = checkpoint_wrapper(layer)
        found = {key.replace("_checkpoint_wrapped_module.", ""): g for key, g in gradients(job).items()}
        if with_sums_in_layers is None:
            with_sums_in_layers = found
    assert all(relative(found[key], value) < 1e-6 for key, value in with_sums_in_layers.items())


def test_dropout_repeats_under_a_seed_and_differs_without():
    job = bert(dropout=0.2)
    adopt(job.model)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(gradients(job))
    assert all(torch.equal(a, b) for a, b in zip(losses[0].values(), losses[1].values(), strict=True))
    assert not torch.equal(losses[0]["loss"], losses[2]["loss"])


def test_the_expected_loss_under_dropout_is_the_plain_one():
    job = bert(dropout=0.1)
    means = []
    for _ in range(2):
        torch.manual_seed(0)
        draws = torch.stack([job.loss(job.model).detach() for _ in range(80)])
        means.append((draws.mean(), draws.std() / 80**0.5))
        adopt(job.model)
    assert abs(means[0][0] - means[1][0]) < 4 * (means[0][1] ** 2 + means[1][1] ** 2) ** 0.5


def test_an_adapter_makes_its_part_run_as_it_is_and_the_report_says_so():
    class LoraLinear(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.a = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.a(x)

    job = llama()
    attn = job.model.model.layers[1].self_attn
    attn.q_proj = LoraLinear(attn.q_proj)
    before = gradients(deep(job))
    adoption = adopt(job.model)
    (row,) = [row for row in adoption.report if not row.fused]
    assert (row.where, row.reason) == ("model.layers.1.self_attn", "q_proj: LoraLinear is not in the table of parts")
    after = gradients(job)
    assert all(relative(after[key], value) < 1e-5 for key, value in before.items())


def test_a_model_without_known_layers_is_left_alone_and_told_what_to_do():
    adoption = adopt(torch.nn.Linear(3, 3))
    assert str(adoption) == (
        "the model: Linear runs as it is: it holds no layer that is known; use om.residual_attention and om.residual_mlp in its forward"
    )


def test_something_that_is_not_a_module_is_refused():
    with pytest.raises(om.ArgumentError) as error:
        adopt("llama")
    assert str(error.value) == "adopt: model must be a torch.nn.Module; got str. Pass the model itself."


@pytest.mark.parametrize("source", ["our BERT", "Hugging Face Bert"])
def test_the_masked_loss_is_computed_on_the_labelled_rows_alone(source, monkeypatch):
    if source not in JOBS:
        pytest.skip("needs transformers, which is not installed")
    monkeypatch.setattr(head, "ROW_MULTIPLE", 4)
    job = deep(JOBS[source]())
    before = gradients(job)
    adopt(job.model)
    seen: list[int] = []
    honest = om.linear_cross_entropy
    monkeypatch.setattr(om, "linear_cross_entropy", lambda x, *args, **kwargs: (seen.append(x.shape[0]), honest(x, *args, **kwargs))[1])
    after = gradients(job)
    largest = max(float(g.norm()) for g in before.values())
    assert all((after[key] - value).norm() <= 3e-6 * max(float(value.norm()), 1e-2 * largest) for key, value in before.items())
    assert len(seen) == 1
    assert seen[0] % 4 == 0
    assert 0 < seen[0] <= 0.6 * 48


@pytest.mark.parametrize(("labelled", "rows"), [(0, 8), (1, 8), (8, 8), (9, 16), (30, None)])
def test_labelled_rows_come_first_and_are_filled_up_to_a_round_number(labelled, rows, monkeypatch):
    monkeypatch.setattr(head, "ROW_MULTIPLE", 8)
    labels = torch.full((4, 10), -100)
    places = torch.randperm(40)[:labelled]
    labels.view(-1)[places] = 5
    found = head.labelled_rows(labels)
    if rows is None:
        assert found is None
        return
    assert found.shape == (rows,)
    assert len(set(found.tolist())) == rows
    assert set(found[:labelled].tolist()) == set(places.tolist())


def test_a_second_adoption_changes_nothing_and_says_so():
    job = llama()
    first = adopt(job.model)
    second = adopt(job.model)
    assert {row.reason for row in second.report} == {"it is adopted already"}
    second.revert()
    assert sum("forward" in m.__dict__ for m in job.model.modules()) == job.swapped
    first.revert()
    assert not any("forward" in m.__dict__ for m in job.model.modules())


@each_job
def test_a_check_compares_every_fused_call_and_leaves_gradients_alone(name):
    job = JOBS[name]()
    adoption = adopt(job.model)
    gradients(job)
    held = {key: (p.grad, p.grad.clone()) for key, p in job.model.named_parameters() if p.grad is not None}
    report = adoption.check(job.loss)
    assert not report.outside
    assert not report.skipped
    assert len({row.site for row in report.rows}) >= 2 * layers_of(job)
    parameters = dict(job.model.named_parameters())
    assert all(parameters[key].grad is grad and torch.equal(grad, before) for key, (grad, before) in held.items())


def test_a_check_finds_a_planted_fault(monkeypatch):
    from ops_math import catalog

    operator = catalog.operators()["rope"]
    (eager,) = [i.module for i in operator.implementations() if i.name == "eager"]
    honest = eager.launch_bwd
    monkeypatch.setattr(eager, "launch_bwd", lambda *args: tuple(t * 1.02 for t in honest(*args)))
    operator.forget()
    job = llama()
    with om.force(rope="eager"), pytest.raises(om.BudgetError, match=r"residual_attention at .*gradient of q_proj\.weight"):
        adopt(job.model).check(job.loss)
    monkeypatch.undo()
    operator.forget()


@needs_transformers
@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_gradient_checkpointing_still_checkpoints(reentrant):
    job = hugging_face("Llama")
    job.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = gradients(job)
    adopt(job.model)
    om.reset_stats()
    after = gradients(job)
    assert all(relative(after[key], value) < 1e-5 for key, value in before.items())
    attention = [row for row in om.stats().rows if row.op == "attention" and row.phase == "fwd"]
    assert sum(row.calls for row in attention) == 4, "each of two layers runs forward twice"


@needs_transformers
def test_hugging_face_options_that_ask_for_more_run_the_models_own_forward():
    job = hugging_face("Llama")
    ids = torch.randint(61, (2, 12))
    job.model.eval()
    plain = job.model(input_ids=ids, labels=ids, output_hidden_states=True)
    adopt(job.model)
    ours = job.model(input_ids=ids, labels=ids, output_hidden_states=True)
    assert len(ours.hidden_states) == len(plain.hidden_states)
    assert all(relative(a, b) < 1e-5 for a, b in zip(ours.hidden_states, plain.hidden_states, strict=True))
    assert relative(ours.logits, plain.logits) < 1e-5


@needs_transformers
def test_hugging_face_generation_with_a_cache_is_what_it_was():
    job = hugging_face("Llama")
    job.model.eval()
    ids = torch.randint(61, (2, 5))
    plain = job.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    adopt(job.model)
    assert torch.equal(job.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), plain)


@needs_transformers
def test_hugging_face_losses_divide_by_the_items_of_the_whole_batch():
    job = hugging_face("Llama")
    ids = torch.randint(61, (2, 12))
    plain = job.model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(50)).loss
    adopt(job.model)
    assert relative(job.model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(50)).loss, plain) < 1e-5
