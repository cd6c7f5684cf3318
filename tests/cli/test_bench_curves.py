"""Loss curves: ours coincide with plain PyTorch's, a wrong gradient or eps does not, and the batches are the same for all."""

import json
import math

import pytest
import torch

from benchmarks import curves as script
from ops_math import catalog, checks
from ops_math.cli.bench import contenders, curves, text
from ops_nn.models import PRESETS, build

WORDS = "\n".join(f"def f{n % 7}(self, x{n % 3}):\n    return self.g{n % 5} + {n % 11}" for n in range(400))
SMALL = contenders.Setup(1, 32, torch.float32, False)
STEPS, WIDTH = 12, 4


def curve(losses, run=""):
    return curves.Curve("plain", run, tuple(losses), 1.0)


@pytest.fixture(scope="module")
def tokens():
    return text.tokens_of(WORDS, 8192)


@pytest.fixture(scope="module")
def trained(tokens):
    """Three plain runs of llama-tiny and one of ours."""
    found = list(curves.measure(curves.Asked("llama-tiny", SMALL, ("packed+adamw",), "cpu", STEPS), tokens))
    return [one for one in found if one.variant == "plain"], found[1]


def again(tokens, variant, prepare=lambda model: None):
    """One more run, as `measure` does it."""
    batches = text.batches(tokens, PRESETS["llama-tiny"], SMALL.batch, SMALL.seq, STEPS)
    runner = contenders.Runner("llama-tiny", variant, *SMALL, "cpu")
    prepare(runner.model)
    return curves.train(runner, batches, PRESETS["llama-tiny"].learning_rate)


def test_ours_coincides_and_the_loss_falls(trained):
    plain, ours = trained
    found = curves.verdict(plain, ours, WIDTH)
    assert found.coincides, str(found)
    assert 0 < found.floor < 1e-4
    assert [one.run for one in plain] == ["", "weights moved 1", "weights moved 2"]
    first, *_, last = plain[0].means(WIDTH)
    assert last < first - 1


@pytest.fixture
def norms_off_by_one_per_cent(monkeypatch):
    """The input gradient of our norm as it runs on a CPU."""
    operator = catalog.operators()["rms_norm"]
    (eager,) = [i.module for i in operator.implementations() if i.name == "eager"]
    honest, calls = eager.launch_bwd, []

    def launch_bwd(*args):
        dx, *others = honest(*args)
        calls.append(1)
        return dx * 1.01, *others

    with monkeypatch.context() as planted:
        planted.setattr(eager, "launch_bwd", launch_bwd)
        operator.forget()
        yield calls
    operator.forget()


def test_an_input_gradient_of_our_norms_that_is_one_per_cent_off_differs(trained, tokens, norms_off_by_one_per_cent):
    found = curves.verdict(trained[0], again(tokens, "ops"), WIDTH)
    assert norms_off_by_one_per_cent, "the planted backward ran"
    assert found.distance > 20 * found.floor, str(found)
    assert not found.coincides


def test_a_wrong_eps_differs(trained, tokens):
    def prepare(model):
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon *= 10

    found = curves.verdict(trained[0], again(tokens, "plain", prepare), WIDTH)
    assert not found.coincides, str(found)


def test_the_fault_that_the_script_plants_differs(trained, tokens):
    found = curves.verdict(trained[0], again(tokens, "plain", lambda model: curves.plant(model, 1.01)), WIDTH)
    assert not found.coincides, str(found)
    honest = curves.verdict(trained[0], again(tokens, "plain", lambda model: curves.plant(model, 1.0)), WIDTH)
    assert honest.coincides, str(honest)


def test_a_fourth_run_of_three_alike_is_called_different_as_seldom_as_stated():
    generator = torch.Generator().manual_seed(3)
    together, apart, trials = 0, 0, 2000
    for _ in range(trials):
        shift = torch.randn(4, 1, generator=generator).expand(4, 10)
        noise = torch.randn(4, 10, generator=generator)
        for each, counted in ((shift, 0), (noise, 1)):
            *plain, other = [curve(row.tolist()) for row in each]
            wrong = not curves.verdict(plain, other, width=1).coincides
            together, apart = together + wrong * (1 - counted), apart + wrong * counted
    assert abs(together / trials - 1 / 18) < 4 * math.sqrt(1 / 18 / trials)
    assert apart <= 3


def test_the_distance_is_the_greatest_of_mean_losses_and_a_shorter_rest_counts_to_the_last_window():
    assert curves.windows([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [2.0, 7.0]
    assert curves.windows([1.0, 3.0], 20) == [2.0]
    plain = [curve([4.0, 4.0, 2.0 + moved, 2.0 + moved]) for moved in (0.0, 0.5, 1.0)]
    found = curves.verdict(plain, curve([4.0, 4.0, 4.0, 4.0]), width=2)
    assert found == curves.Verdict(floor=1.0, distance=1.0, offset=0.75)
    assert str(found).startswith("coincides: 1.00e+00 from the nearest plain run, 1.00 of the floor 1.00e+00")
    assert not curves.verdict(plain, curve([4.0, 4.0, 5.1, 5.1]), width=2).coincides


def test_a_loss_that_is_no_number_differs_and_without_plain_runs_nothing_is_judged():
    plain = [curve([1.0 + moved] * 4) for moved in (0.0, 0.1, 0.2)]
    assert curves.verdict(plain, curve([1.0, math.nan, 1.0, 1.0]), width=2).distance == math.inf
    same = [curve([1.0] * 4)] * 3
    assert not curves.verdict(same, curve([1.0, 1.0, 1.0, 1.0 + 1e-7]), width=2).coincides
    assert curves.verdict(same, curve([1.0] * 4), width=2).coincides
    for few in (plain[:2], [*plain, curve([math.inf] * 4)]):
        with pytest.raises(checks.ArgumentError, match=r"^bench curves: runs must be at least 3 of plain PyTorch with finite losses; got"):
            curves.verdict(few, plain[0])


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1.0), (torch.bfloat16, 1 / 12)])
def test_matrices_move_by_one_ulp_and_vectors_stay(dtype, share):
    model, still = build("llama-tiny", dtype=dtype), build("llama-tiny", dtype=dtype)
    curves.perturb(model, 1, dtype)
    for p, q in zip(model.parameters(), still.parameters(), strict=True):
        if p.dim() == 1:
            assert torch.equal(p, q)
            continue
        up, down = (torch.nextafter(q, torch.full_like(q, end)) for end in (math.inf, -math.inf))
        moved = p != q
        assert torch.equal(p[moved], torch.where(p > q, up, down)[moved])
        assert abs(moved.float().mean().item() - share) < 0.01
        assert abs((p > q).float().mean().item() - share / 2) < 0.01
    other = build("llama-tiny", dtype=dtype)
    curves.perturb(other, 2, dtype)
    assert not all(map(torch.equal, model.parameters(), other.parameters()))


def test_under_autocast_weights_move_by_an_ulp_of_what_is_computed_with():
    model, still = build("bert-tiny"), build("bert-tiny")
    curves.perturb(model, 1, torch.bfloat16)
    p, q = model.bert.embeddings.word_embeddings.weight, still.bert.embeddings.word_embeddings.weight
    moved = p != q
    assert abs(moved.float().mean().item() - 1 / 12) < 0.01
    away = ((p - q).abs() / q.abs())[moved]
    assert away.min() > 2**-9.01
    assert away.max() < 2**-6.99


def test_without_dropout_plain_runs_differ_by_their_weights(tokens, monkeypatch):
    drops = []
    original = curves.train

    def train(runner, *args):
        drops.extend(m.p for m in runner.model.modules() if isinstance(m, torch.nn.Dropout))
        return original(runner, *args)

    monkeypatch.setattr(curves, "train", train)
    asked = curves.Asked("bert-tiny", contenders.Setup(1, 32, torch.float32, True), ("ops",), "cpu", 2, dropout=False)
    found = list(curves.measure(asked, tokens))
    assert [one.run for one in found] == ["", "", "weights moved 1", "weights moved 2"]
    assert set(drops) == {0.0}
    assert asked.noise == "one ulp in 0.0833 of the matrices' elements"


def test_masked_batches_reach_the_model_as_they_are_and_other_masks_are_other_runs(tokens, monkeypatch):
    """Inputs and labels of a masked model's own workload are one tensor: writing one must not write the other."""
    setup, seen = contenders.Setup(2, 32, torch.float32, False), []
    original = contenders.Runner.loss

    def loss(self):
        seen.append({name: tensor.clone() for name, tensor in self.inputs.items()})
        return original(self)

    monkeypatch.setattr(contenders.Runner, "loss", loss)
    found = list(curves.measure(curves.Asked("bert-tiny", setup, ("ops",), "cpu", 3), tokens))
    batches = text.batches(tokens, PRESETS["bert-tiny"], 2, 32, 3)
    assert len(seen) == 4 * 3
    for i, inputs in enumerate(seen):
        assert all(torch.equal(inputs[name], tensor) for name, tensor in batches[i % 3].named().items())
    hidden = batches[0].labels >= 0
    assert 0 < hidden.sum() < 2 * 32 / 3
    assert not torch.equal(batches[0].input_ids[hidden], batches[0].labels[hidden])
    plain, _, first, second = found
    assert [first.run, second.run] == ["other masks 1", "other masks 2"]
    assert len({one.losses for one in (plain, first, second)}) == 3


def test_every_window_of_the_text_comes_once_before_any_again_and_labels_follow(tokens):
    preset, seq = PRESETS["llama-tiny"], 64
    count = (len(tokens.ids) - 1) // seq
    made = text.batches(tokens, preset, 1, seq, count + 3)
    rows = [tuple(batch.input_ids[0].tolist()) for batch in made]
    assert sorted(rows[:count]) == sorted(tuple(tokens.ids[i * seq : (i + 1) * seq].tolist()) for i in range(count))
    assert all(torch.equal(batch.input_ids[:, 1:], batch.labels[:, :-1]) for batch in made)
    repeated = text.batches(tokens, preset, 1, seq, count + 3)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(made, repeated, strict=True))
    with pytest.raises(checks.ArgumentError, match=r"^bench curves: the text must be more than 99999 tokens, one sequence; got"):
        text.batches(tokens, preset, 1, 99999, 1)


def test_a_word_list_keeps_the_frequent_words_and_loses_no_character():
    assert "".join(text.PIECE.findall(WORDS)) == WORDS
    found = text.tokens_of("a a a b b c", 4)
    assert found.ids.tolist() == [text.RARE, 2, 2, 3, 3, text.RARE], "the first has no space before it"
    assert found.end == 4
    library = text.standard_library()
    assert "def python_is_optimized" not in library
    assert len(library) > 1_000_000


def test_the_rate_warms_up_and_reaches_a_tensor_in_place(tokens):
    batches = text.batches(tokens, PRESETS["llama-tiny"], 1, 32, 10)
    runner = contenders.Runner("llama-tiny", "plain", *SMALL, "cpu")
    (group,) = runner.optimizer.param_groups
    group["lr"] = held = torch.tensor(1.0)
    seen = []
    monkey = runner.step
    runner.step = lambda: (seen.append(held.item()), monkey())[1]
    curves.train(runner, batches, 0.01)
    assert seen == pytest.approx([0.005] + [0.01] * 9)
    assert group["lr"] is held


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"runs": 1}, r"^bench curves: --runs must be at least 2; got 1\."),
        ({"steps": 1}, r"^bench curves: --steps must be at least 2; got 1\."),
        (
            {"runs": 2, "again": 2},
            r"^bench curves: --again must be so many .* 2%; got 3 plain runs and 3 of a variant, where it is 10\.0% at",
        ),
        ({"variants": ("plain",)}, r"^bench curves: --variants must be other than plain, on full sequences; got 'plain'\."),
        ({"variants": ("ops+trimmed",)}, r"^bench curves: --variants must be other than plain, on full sequences; got 'ops\+trimmed'\."),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_is_trained(asked, words):
    usual = curves.Asked("llama-tiny", SMALL, ("ops",), "cpu")
    with pytest.raises(checks.ArgumentError, match=words):
        curves.check(usual._replace(**asked))


@pytest.mark.parametrize(("ours", "code"), [(2.5, 0), (2.7, 1)])
def test_the_script_writes_a_row_a_run_at_once_and_a_verdict_and_fails_when_ours_differs(tmp_path, monkeypatch, capsys, ours, code):
    path, written = tmp_path / "r.jsonl", []

    def measure(asked, tokens):
        assert (asked.model, asked.variants, asked.steps, asked.planted) == ("llama-tiny", ("ops",), 40, 1.01)
        assert asked.setup == contenders.Setup(1, 16, torch.float32, False)
        for variant, run, loss in [
            ("plain", "", 2.0), ("ops", "", ours), ("plain", "weights moved 1", 2.1), ("plain", "weights moved 2", 2.2),
            ("plain", "gradients times 1.01", 9.0),
        ]:  # fmt: skip
            yield curves.Curve(variant, run, (3.0,) * 20 + (loss,) * 20, 5.0)
            written.append(len(path.read_text().splitlines()))

    monkeypatch.setattr(script.curves, "measure", measure)
    monkeypatch.setattr(script.text, "standard_library", lambda: WORDS)
    monkeypatch.setenv("OPS_MATH_COMMIT", "abc")
    options = "--model llama-tiny --variants ops --batch 1 --seq 16 --steps 40 --planted 1.01 --results"
    monkeypatch.setattr("sys.argv", ["benchmarks/curves.py", *options.split(), str(path)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == code
    assert written == [1, 2, 3, 4, 5]
    *runs, first, fault = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["variant"] for row in runs] == ["plain", "ops", "plain", "plain", "plain"]
    assert runs[0]["losses"] == [3.0, 3.0, 2.0, 2.0]
    assert all(row["commit"] == "abc" and row["lr"] == 2e-3 and row["text_hash"] for row in runs)
    assert (first["benchmark"], first["coincides"], fault["coincides"]) == ("curve verdict", code == 0, False)
    assert (first["final_loss"], first["plain_final"], first["floor"]) == (ours, [2.0, 2.1, 2.2], pytest.approx(0.2))
    assert f"llama-tiny ops {'DIFFERS' if code else 'coincides'}: " in capsys.readouterr().out


def test_the_script_refuses_in_words(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks/curves.py", "--runs", "1"])
    with pytest.raises(SystemExit):
        script.main()
    assert "bench curves: --runs must be at least 2; got 1." in capsys.readouterr().err


def test_runs_together_differ_where_few_ways_to_divide_them_part_them_so_far():
    plain = [curve([3.0, 2.0 + moved]) for moved in (0.0, 0.1, 0.2, 0.3, 0.4)]
    ours = [curve([3.0, 2.0 + moved]) for moved in (0.05, 0.15, 0.25, 0.35)]
    found = curves.together(plain, ours, width=1)
    assert found.coincides
    assert found.gap == pytest.approx(0.0)
    assert found.chance == 1.0
    assert str(found) == "coincide together: 0.00e+00 between the means, as much or more in 100.0% of 126 ways to divide the runs"
    found = curves.together(plain, [curve([3.0, 3.5 + moved]) for moved in (0.0, 0.1, 0.2, 0.3)], width=1)
    assert not found.coincides
    assert found.gap == pytest.approx(1.45)
    assert found.chance == curves.least_chance(5, 4) == 1 / 126
    assert curves.together(plain, [*ours[1:], curve([3.0, math.nan])], width=1) == curves.Together(math.inf, 0.0, 126)
    assert curves.together(plain[:4], ours, width=1).ways == 70
    apart = curves.together([curve([1.0 + k / 100]) for k in range(4)], [curve([2.0 + k / 100]) for k in range(4)], width=1)
    assert apart.chance == curves.least_chance(4, 4) == 2 / 70


def test_runs_of_one_kind_are_called_different_as_seldom_as_stated():
    generator = torch.Generator().manual_seed(5)
    trials = 400
    drawn = torch.randn(trials, 9, 10, generator=generator).cumsum(2)  # windows that move together
    wrong = sum(not curves.together(*_divided(runs), width=1).coincides for runs in drawn.tolist())
    assert wrong / trials < curves.ALPHA + 3 * math.sqrt(curves.ALPHA / trials)


def _divided(runs):
    found = [curve(run) for run in runs]
    return found[:5], found[5:]


def test_variants_are_trained_again_from_moved_weights(tokens):
    found = list(curves.measure(curves.Asked("llama-tiny", SMALL, ("ops",), "cpu", 6, runs=4, again=3), tokens))
    assert [one.variant for one in found] == ["plain", "ops", *["plain"] * 4, *["ops"] * 3]
    assert [one.run for one in found[-3:]] == [f"weights moved {k}" for k in (1, 2, 3)]
    assert len({one.losses for one in found if one.variant == "ops"}) == 4


@pytest.mark.parametrize(("shift", "code"), [(0.05, 0), (0.9, 1)])
def test_the_script_judges_runs_together(tmp_path, monkeypatch, capsys, shift, code):
    def measure(asked, tokens):
        yield from (curves.Curve("plain", str(k), (2.0 + k / 10,) * 2, 1.0) for k in range(5))
        yield from (curves.Curve("ops", str(k), (2.0 + shift + k / 10,) * 2, 1.0) for k in range(4))

    monkeypatch.setattr(script.curves, "measure", measure)
    monkeypatch.setattr(script.text, "standard_library", lambda: WORDS)
    path = tmp_path / f"{code}.jsonl"
    options = f"--model llama-tiny --variants ops --batch 1 --seq 16 --steps 2 --runs 4 --again 3 --results {path}"
    monkeypatch.setattr("sys.argv", ["benchmarks/curves.py", *options.split()])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == code
    assert f"llama-tiny ops: 4 runs and 5 plain ones {'DIFFER' if code else 'coincide'} together: " in capsys.readouterr().out
    row = json.loads(path.read_text().splitlines()[-1])
    assert (row["benchmark"], row["coincides"], row["ways"], row["runs"]) == ("curve group", code == 0, 126, 4)
