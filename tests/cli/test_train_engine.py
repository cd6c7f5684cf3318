"""The training step, its schedule, its checkpoints, and runs that go on where they stopped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ops_math import ArgumentError, UnsupportedError
from ops_math.cli.train import checkpoint, session, variants
from ops_math.cli.train.config import COMPILED, OPS_MATH, PLAIN, TrainConfig
from ops_math.cli.train.data import Data
from ops_math.cli.train.engine import LAST_SHARE, Run, learning_rate
from ops_math.cli.train.session import Session
from ops_nn.models import PRESETS
from tests.cli import train_fixtures as fixtures


@pytest.fixture(autouse=True)
def _presets(monkeypatch: pytest.MonkeyPatch) -> None:
    fixtures.add_presets(monkeypatch)


def train(used: TrainConfig, data: Data, until: int | None = None) -> Session:
    training = Session(used, data)
    training.advance(lambda: None, lambda: training.step == until)
    return training


def weights(training: Session) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": tensor.clone() for name, run in training.runs.items() for key, tensor in run.tensors().items()}


def resumed(used: TrainConfig, data: Data, path: Path) -> Session:
    training = Session(used, data)
    training.resume(path, checkpoint.read_state(path))
    return training


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave torch.compile out where it is not the subject: it takes long."""
    monkeypatch.setattr(TrainConfig, "variants", property(lambda self: names))


def test_the_learning_rate_warms_up_peaks_and_ends_at_a_tenth() -> None:
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(LAST_SHARE)
    assert rates[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rate(0, 1, 1.0) == 1.0


@pytest.mark.parametrize("model", ["small", "small-bert"])
def test_training_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    only(monkeypatch, PLAIN)
    used = fixtures.config(model=model, steps=40, lr=3e-2)
    losses = train(used, fixtures.load(tmp_path, used)).runs[PLAIN].losses
    assert losses[0] == pytest.approx(math.log(300), abs=0.2)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5


def test_the_step_is_adamw_with_clipping_as_written_out_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, PLAIN)
    used = fixtures.config(steps=20)
    data = fixtures.load(tmp_path, used)
    run = train(used, data, until=1).runs[PLAIN]
    model = variants.weights(used)
    batch = data.batch(0)
    model(*batch).loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters()))
    rate = learning_rate(0, 20, used.lr)
    assert norm > 1.0
    for mine, theirs in zip(model.parameters(), run.model.parameters(), strict=True):
        clipped = mine.grad.double() / norm
        decay = 0.1 if mine.dim() > 1 else 0.0
        expected = mine.double() * (1 - rate * decay) - rate * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(theirs.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_keeps_weights_in_fp32_and_follows_the_fp32_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    only(monkeypatch, PLAIN)
    data = fixtures.load(tmp_path, fixtures.config())
    low = train(fixtures.config(dtype=dtype), data).runs[PLAIN]
    high = train(fixtures.config(), data).runs[PLAIN]
    assert {p.dtype for p in low.model.parameters()} == {torch.float32}
    assert low.scaler.is_enabled() == (dtype == "fp16")
    assert low.losses != high.losses
    assert low.losses[0] == pytest.approx(high.losses[0], abs=0.02)
    # GradScaler begins with a scale that overflows and skips those steps: fp16 lags behind by them.
    assert high.losses[-1] - 0.1 < low.losses[-1] < high.losses[0] - 0.3


def test_runs_start_from_the_same_weights_and_see_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, PLAIN, OPS_MATH)
    used = fixtures.config(compare=True)
    training = train(used, fixtures.load(tmp_path, used))
    plain, ours = training.runs[PLAIN].losses, training.runs[OPS_MATH].losses
    assert ours == pytest.approx(plain, abs=1e-4)
    assert training.adopted


@pytest.mark.parametrize("model", ["small", "small-bert"])
def test_documents_kept_apart_train_alike_in_plain_pytorch_and_with_ops_math(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, PLAIN, OPS_MATH)
    without = dataclasses.replace(fixtures.BERT.config, hidden_dropout=0.0, attention_dropout=0.0)  # each draws masks of its own
    monkeypatch.setitem(PRESETS, "small-bert", dataclasses.replace(fixtures.BERT, config=without))
    used = fixtures.config(model=model, compare=True, documents=True, steps=4)
    text = fixtures.load(tmp_path, used)
    text.end = int(text.train.bincount().argmax())  # the text is one document: let its most frequent token end some
    losses = {name: run.losses for name, run in train(used, text).runs.items()}
    assert losses[OPS_MATH] == pytest.approx(losses[PLAIN], abs=1e-4)
    run = Session(used, text).runs[OPS_MATH]
    assert math.isfinite(run.validation_loss(text.validation()))
    text.config = dataclasses.replace(used, documents=False)
    whole = train(text.config, text).runs[PLAIN].losses
    assert abs(whole[-1] - losses[PLAIN][-1]) > 1e-5, "a token that sees all of its sequence predicts otherwise"


def test_runs_take_turns_in_mirrored_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, PLAIN, OPS_MATH)
    order: list[str] = []
    real = Run.timed_step
    monkeypatch.setattr(Run, "timed_step", lambda run, batch, step: (order.append(run.name), real(run, batch, step))[1])
    used = fixtures.config(steps=4, compare=True)
    train(used, fixtures.load(tmp_path, used))
    assert order == [PLAIN, OPS_MATH, OPS_MATH, PLAIN] * 2


@pytest.mark.slow
def test_without_a_compiler_the_row_says_so_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    only(monkeypatch, PLAIN, COMPILED)
    used = fixtures.config(steps=2, compare=True, seed=12)
    with inductor.patch({"cpp.cxx": ("/nowhere/c++",), "fx_graph_cache": False}):
        training = train(used, fixtures.load(tmp_path, used))
    assert list(training.runs) == [PLAIN]
    assert training.unavailable[COMPILED].startswith("it failed to compile (")
    assert len(training.runs[PLAIN].losses) == 2


@pytest.mark.parametrize(("model", "dtype"), [("small", "fp32"), ("small", "fp16"), ("small-bert", "fp32")])
def test_a_stopped_run_ends_with_the_bits_of_one_that_was_never_stopped(tmp_path: Path, model: str, dtype: str) -> None:
    used = fixtures.config(model=model, dtype=dtype)
    data, path = fixtures.load(tmp_path, used), tmp_path / checkpoint.FILE_NAME
    whole = train(used, data)
    train(used, data, until=3).save(path)
    torch.manual_seed(1234)
    rest = resumed(used, data, path)
    assert rest.step == 3
    rest.advance(lambda: None, lambda: False)
    expected, found = weights(whole), weights(rest)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert rest.runs[OPS_MATH].losses == whole.runs[OPS_MATH].losses
    assert rest.starts == [0, 3]


def test_a_stopped_comparison_ends_with_the_bits_of_one_that_was_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, PLAIN, OPS_MATH)
    used = fixtures.config(compare=True)
    data, path = fixtures.load(tmp_path, used), tmp_path / checkpoint.FILE_NAME
    whole = train(used, data)
    train(used, data, until=5).save(path)
    rest = resumed(used, data, path)
    rest.advance(lambda: None, lambda: False)
    expected, found = weights(whole), weights(rest)
    assert {key.split("/")[0] for key in found} == {PLAIN, OPS_MATH}
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_checkpoint_taken_twice_has_the_same_tensors_and_no_optimizer_state_before_the_first_step(tmp_path: Path) -> None:
    used = fixtures.config()
    data = fixtures.load(tmp_path, used)
    train(used, data, until=0).save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert not [key for key in file.keys() if "/optimizer/" in key]
    rest = resumed(used, data, tmp_path / "a.safetensors")
    rest.advance(lambda: None, lambda: False)
    assert all(torch.equal(a, b) for a, b in zip(weights(rest).values(), weights(train(used, data)).values(), strict=True))


def test_a_finished_checkpoint_has_the_weights_of_ops_math_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, PLAIN, OPS_MATH)
    used = fixtures.config(compare=True, steps=2)
    done = train(used, fixtures.load(tmp_path, used))
    done.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        held = {key: file.get_tensor(key) for key in file.keys() if not key.startswith("rng/")}
    expected = {f"ops_math/weights/{name}": parameter for name, parameter in done.runs[OPS_MATH].model.named_parameters()}
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[key], expected[key]) for key in held)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_comparison_with_torch_compile_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, COMPILED)
    used = fixtures.config(compare=True, steps=4)
    data, path = fixtures.load(tmp_path, used), tmp_path / checkpoint.FILE_NAME
    whole = train(used, data)
    train(used, data, until=2).save(path)
    rest = resumed(used, data, path)
    rest.advance(lambda: None, lambda: False)
    assert whole.unavailable == rest.unavailable == {}
    expected, found = weights(whole), weights(rest)
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_public_weight_names_stand_in_the_checkpoint(tmp_path: Path) -> None:
    used = fixtures.config()
    train(used, fixtures.load(tmp_path, used), until=1).save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        keys = set(file.keys())
    assert "ops_math/weights/model.layers.0.self_attn.q_proj.weight" in keys
    assert "ops_math/optimizer/model.layers.0.self_attn.q_proj.weight/exp_avg" in keys


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    used = fixtures.config()
    path = tmp_path / checkpoint.FILE_NAME
    train(used, fixtures.load(tmp_path, used), until=2).save(path)
    return path


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_checkpoint_is_refused_in_words_and_not_overwritten(saved: Path, share: float) -> None:
    cut = saved.read_bytes()
    cut = cut[: int(len(cut) * share)]
    saved.write_bytes(cut)
    with pytest.raises(
        UnsupportedError, match=r"^train: .*: not a complete checkpoint \(.*\); it is left as it is. Name another file or folder$"
    ):
        checkpoint.read_state(saved)
    used = fixtures.config()
    with pytest.raises(UnsupportedError, match=r"not a complete checkpoint .*it is in the way of a new checkpoint and is left as it is"):
        train(used, fixtures.load(saved.parent, used), until=1).save(saved)
    assert saved.read_bytes() == cut


def test_a_file_of_another_program_is_refused_in_words_and_not_overwritten(saved: Path) -> None:
    save_file({"weight": torch.ones(2)}, saved)
    foreign = saved.read_bytes()
    with pytest.raises(UnsupportedError, match=r"a safetensors file of another program, not a checkpoint of `ops-math train`"):
        checkpoint.read_state(saved)
    used = fixtures.config()
    with pytest.raises(UnsupportedError, match=r"another program"):
        train(used, fixtures.load(saved.parent, used), until=1).save(saved)
    assert saved.read_bytes() == foreign


def test_a_checkpoint_of_a_later_format_is_refused_in_words(saved: Path) -> None:
    save_file({"weight": torch.ones(2)}, saved, {checkpoint.HEADER: json.dumps({"format": 7})})
    with pytest.raises(UnsupportedError, match=r"a checkpoint of format 7, and this version reads format 1; it is left as it is"):
        checkpoint.read_state(saved)


def test_weights_of_another_shape_are_refused_in_words(saved: Path, tmp_path: Path) -> None:
    used = fixtures.config(model="small-bert")
    with pytest.raises(UnsupportedError, match=r"its weights are not those of small-bert \(\d+ differ, the first is weights/bert"):
        resumed(used, fixtures.load(tmp_path, used), saved)


def test_other_text_is_refused_in_words(saved: Path, tmp_path: Path) -> None:
    used = fixtures.config()
    data = fixtures.load(tmp_path, used)
    other = Data(data.train[:-1], data.held_out, used, data.mask_ids, "elsewhere")
    with pytest.raises(
        ArgumentError, match=r"^train: --data must be the text of .* \(tokens \w+\); got elsewhere \(tokens \w+\). Give the text"
    ):
        resumed(used, other, saved)


def test_a_crash_while_writing_leaves_the_old_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def crash(tensors: object, filename: str, metadata: object) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", crash)
    used = fixtures.config()
    with pytest.raises(
        UnsupportedError, match=r"the checkpoint .*: it cannot be written \(.*No space left on device\). Free space or choose"
    ):
        train(used, fixtures.load(saved.parent, used), until=1).save(saved)
    assert saved.read_bytes() == before
    assert not list(saved.parent.glob(".checkpoint-*"))


def test_the_noise_floor_moves_every_weight_by_one_ulp_and_little_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, PLAIN)
    used = fixtures.config()
    before, after = variants.weights(used), variants.weights(used)
    session.perturb(after, used.seed)
    for a, b in zip(before.parameters(), after.parameters(), strict=True):
        assert ((b == torch.nextafter(a, torch.tensor(math.inf))) | (b == torch.nextafter(a, torch.tensor(-math.inf)))).all()
    data = fixtures.load(tmp_path, used)
    plain = train(used, data).runs[PLAIN].losses
    noisy = session.noise_floor(used, data, lambda: None, lambda: False)
    gaps = [abs(a - b) for a, b in zip(plain, noisy, strict=True)]
    assert 0.0 < max(gaps) < 1e-3


def test_the_noise_floor_of_a_model_with_dropout_draws_other_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, PLAIN)
    used = fixtures.config(model="small-bert")
    assert used.dropout
    data = fixtures.load(tmp_path, used)
    plain = train(used, data).runs[PLAIN].losses
    noisy = session.noise_floor(used, data, lambda: None, lambda: False)
    assert abs(plain[0] - noisy[0]) > 1e-4
    assert noisy[-1] == pytest.approx(plain[-1], abs=0.5)
