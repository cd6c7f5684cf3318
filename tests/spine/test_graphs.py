"""graphed_step: warm calls, records by shape, copied inputs, and refusals in words; on a GPU the same losses as without."""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from ops_math import settings

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="missing capability: a CUDA device")


class Recorder:
    """Replays by running the recorded step on its buffers again; a recording runs nothing that counts."""

    kind = ""

    def __init__(self, error=None):
        self.error, self.recorded, self.warmed = error, 0, 0

    def warm(self, step):
        self.warmed += 1
        return step()

    def record(self, step):
        self.recorded += 1
        if self.error is not None:
            raise self.error
        box = [torch.zeros(())]

        def replay():
            box[0].copy_(step())

        return replay, box[0]


def summed(calls):
    def step(x, scale=1.0):
        calls.append(x)
        return x.sum() * scale

    return step


def test_first_calls_run_as_they_are_then_the_record_is_replayed_on_copied_inputs():
    calls, recorder = [], Recorder()
    step = om.graphed_step(summed(calls), warmup=2, recorder=recorder)
    xs = [torch.full((3,), float(i)) for i in range(6)]
    assert [step(x).item() for x in xs] == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    assert (recorder.warmed, recorder.recorded) == (2, 1)
    assert all(call is x for call, x in zip(calls[:2], xs[:2], strict=True))
    assert all(call is calls[2] for call in calls[3:])  # the buffers
    assert torch.equal(xs[2], torch.full((3,), 2.0))  # the callers' tensors are not written to
    assert step.usage() == (2, 1, 4, 0, "")


def test_each_shape_dtype_and_plain_value_is_a_record_of_its_own():
    recorder = Recorder()
    step = om.graphed_step(summed([]), warmup=1, recorder=recorder)
    inputs = [(torch.ones(3),), (torch.ones(4),), (torch.ones(3, dtype=torch.float64),), (torch.ones(3), 2.0), (torch.ones(6)[::2],)]
    for given in inputs * 3:
        step(*given)
    assert recorder.recorded == len(inputs)


def test_inputs_by_name_and_what_cannot_be_part_of_a_shape():
    recorder = Recorder()
    step = om.graphed_step(lambda x, *, mask: (x * mask).sum(), warmup=1, recorder=recorder)
    assert [step(torch.ones(3), mask=torch.full((3,), float(n))).item() for n in range(4)] == [0.0, 3.0, 6.0, 9.0]
    assert recorder.recorded == 1
    with pytest.raises(om.ArgumentError, match="inputs must be tensors and plain values; got a list"):
        step([torch.ones(3)], mask=torch.ones(3))


SETTINGS = {
    "grad mode": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another autocast": lambda: torch.autocast("cpu", torch.float16),
    "switched off": lambda: om.enabled(False),
    "determinism": lambda: om.determinism(1),
    "policy": lambda: om.precision("ieee"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_around_a_call_are_followed_as_without_a_record(name):
    seen = lambda: (  # noqa: E731
        torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), om.is_enabled(),
        torch.are_deterministic_algorithms_enabled(), settings.policy(),
    )  # fmt: skip
    ran, recorder = [], Recorder()
    step = om.graphed_step(lambda x: ran.append(seen()) or x.sum(), warmup=1, recorder=recorder)
    for _ in range(3):
        step(torch.ones(3))
    with SETTINGS[name]():
        for _ in range(3):
            ran.clear()
            step(torch.ones(3))
            assert ran == [seen()]
    assert recorder.recorded == 2
    step(torch.ones(3))
    assert recorder.recorded == 2


def test_plain_values_that_are_equal_and_of_other_types_are_told_apart():
    recorder = Recorder()
    step = om.graphed_step(lambda x, flag: x.sum() * (2.0 if flag is True else 3.0), warmup=1, recorder=recorder)
    for _ in range(3):
        assert step(torch.ones(3), True).item() == 6.0
        assert step(torch.ones(3), 1).item() == 9.0


def test_an_input_whose_gradient_would_be_lost_is_refused():
    step = om.graphed_step(lambda x: x.sum().backward(), warmup=1, recorder=Recorder())
    with pytest.raises(om.ArgumentError) as error:
        step(torch.ones(3, requires_grad=True))
    needs = "inputs must be tensors that need no gradient, since they are copied; got one that requires a gradient"
    assert str(error.value) == f"graphed_step: {needs}. Let the step read it from where it is, as it reads parameters."


def test_an_input_that_is_elsewhere_is_refused_since_its_value_would_stay():
    recorder = Recorder()
    recorder.kind = "cuda"
    step = om.graphed_step(lambda x: x, warmup=1, recorder=recorder)
    with pytest.raises(om.ArgumentError) as error:
        step(torch.ones(()))
    do = "Move it, x.to('cuda'): a record would keep its value."
    assert str(error.value) == f"graphed_step: inputs must be on cuda; got a tensor on cpu. {do}"


class Writing(Recorder):
    """Runs the step while it records, as a capture does."""

    def record(self, step):
        step()
        return super().record(step)


def test_a_step_that_writes_into_its_input_is_refused():
    step = om.graphed_step(lambda x: x.add_(1.0).sum(), warmup=1, recorder=Writing())
    x = torch.zeros(3)
    step(x)
    with pytest.raises(om.UnsupportedError) as error:
        step(x)
    why = "the step cannot be recorded: it writes into an input, and would write into the record's copy of it"
    assert str(error.value) == f'graphed_step: {why}. Take that out, or pass on_refusal="eager".'
    assert torch.equal(x, torch.ones(3))


def test_shapes_beyond_the_limit_run_as_they_are():
    recorder = Recorder()
    step = om.graphed_step(summed([]), warmup=1, max_graphs=2, recorder=recorder)
    for n in range(1, 6):
        for _ in range(4):
            assert step(torch.ones(n)).item() == n
    assert recorder.recorded == 2
    assert step.usage().eager == 9


def test_a_step_that_waits_for_the_device_is_refused_in_words():
    error = RuntimeError("CUDA error: operation not permitted when stream is capturing\nsome more lines")
    step = om.graphed_step(summed([]), warmup=1, recorder=Recorder(error))
    step(torch.ones(2))
    with pytest.raises(om.UnsupportedError, match=r"cannot be recorded: CUDA error.*\.item\(\).*on_refusal"):
        step(torch.ones(2))


def an_optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1)


def test_gradients_of_a_failed_recording_are_taken_back():
    optimizer = an_optimizer()
    (weight,) = optimizer.param_groups[0]["params"]
    seen = []

    class Failing(Recorder):
        def record(self, step):
            step()  # its gradients were recorded, never computed
            weight.grad = torch.full((3,), float("nan"))
            raise RuntimeError("operation not permitted when stream is capturing")

    def train(x):
        seen.append(weight.grad)
        (weight * x).sum().backward()
        found = weight.grad.clone()
        optimizer.zero_grad(set_to_none=True)
        return found

    step = om.graphed_step(train, optimizer=optimizer, warmup=1, on_refusal="eager", recorder=Failing())
    for _ in range(3):
        assert torch.equal(step(torch.ones(3)), torch.ones(3))
    assert seen == [None] * 4


def test_going_on_without_a_record_wants_the_optimizer():
    with pytest.raises(om.ArgumentError, match="optimizer must be the optimizer that the step calls"):
        om.graphed_step(summed([]), on_refusal="eager", recorder=Recorder())


def test_or_it_goes_on_as_it_is_and_says_so():
    failing = Recorder(RuntimeError("captures end badly"))
    step = om.graphed_step(summed([]), optimizer=an_optimizer(), warmup=1, on_refusal="eager", recorder=failing)
    assert [step(torch.ones(2)).item() for _ in range(3)] == [2.0] * 3
    assert step.usage().eager == 2
    assert "captures end badly" in step.usage().refused
    step.reset()
    assert step.usage().refused == ""


def test_running_out_of_memory_is_not_a_refusal():
    failing = Recorder(torch.OutOfMemoryError("no memory"))
    step = om.graphed_step(summed([]), optimizer=an_optimizer(), warmup=1, on_refusal="eager", recorder=failing)
    step(torch.ones(2))
    with pytest.raises(torch.OutOfMemoryError):
        step(torch.ones(2))


def test_the_optimizers_numbers_become_tensors_that_schedulers_fill():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (n + 1))
    om.graphed_step(summed([]), optimizer=optimizer, recorder=Recorder())
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert optimizer.param_groups[0]["capturable"] is True
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup": 0}, "warmup must be an integer of at least 1; got 0"),
        ({"max_graphs": 0}, "max_graphs must be an integer of at least 1; got 0"),
        ({"on_refusal": "ignore"}, "on_refusal must be"),
        ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer; got int"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(om.ArgumentError, match=words):
        om.graphed_step(summed([]), recorder=Recorder(), **options)


def test_a_step_must_be_callable():
    with pytest.raises(om.ArgumentError, match="step must be a function of the inputs; got int"):
        om.graphed_step(3, recorder=Recorder())


def test_an_optimizer_without_a_capturable_form_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(om.UnsupportedError, match="SGD has no capturable form"):
        om.graphed_step(summed([]), optimizer=optimizer, recorder=Recorder())


@pytest.mark.skipif(torch.cuda.is_available(), reason="missing capability: a machine without CUDA")
def test_without_cuda_it_is_refused():
    with pytest.raises(om.UnsupportedError, match="CUDA graphs need a CUDA device"):
        om.graphed_step(summed([]))


def _job(dropout):
    from ops_nn.adopt import adopt
    from ops_nn.models import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if dropout:
        model = BertForMaskedLM(BertConfig(512, 64, 128, num_layers=2, num_heads=4, max_position_embeddings=64))
    else:
        model = LlamaForCausalLM(LlamaConfig(512, 64, 128, 2, 4, 2, 16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    model = model.cuda().train()
    adopt(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)

    def step(ids):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, optimizer


@gpu
@needs_gpu
def test_on_a_gpu_the_losses_are_those_of_the_step_itself():
    batches = [torch.randint(512, (2, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(i)) for i in range(10)]
    plain, _ = _job(False)
    expected = [plain(ids).item() for ids in batches]
    step, optimizer = _job(False)
    graphed = om.graphed_step(step, optimizer=optimizer)
    found = [graphed(ids).item() for ids in batches]
    assert graphed.usage().replayed == 7
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)


@gpu
@needs_gpu
def test_on_a_gpu_each_replay_draws_other_masks():
    step, optimizer = _job(True)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    graphed = om.graphed_step(step, optimizer=optimizer)
    ids = torch.randint(512, (2, 64), device="cuda")
    losses = [graphed(ids).item() for _ in range(12)]
    assert len(set(losses[4:])) > 4


@gpu
@needs_gpu
def test_on_a_gpu_a_waiting_step_is_refused():
    graphed = om.graphed_step(lambda x: x.sum().item(), warmup=1)
    graphed(torch.ones(3, device="cuda"))
    with pytest.raises(om.UnsupportedError, match="cannot be recorded"):
        graphed(torch.ones(3, device="cuda"))
    assert torch.ones(3, device="cuda").sum().item() == 3.0  # the device goes on
