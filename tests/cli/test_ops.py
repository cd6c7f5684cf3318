"""`ops-math ops`: the matrix is what the operators answer, and the README shows it as it is now."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops_math import backends, catalog, checks
from ops_math.cli import ops
from ops_math.cli.app import application
from ops_math.spec import Implementation

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture(scope="module")
def cells() -> list[ops.Cell]:
    return ops.matrix()


@pytest.mark.slow
def test_the_readme_shows_the_matrix_as_it_is(cells):
    text = README.read_text()
    fresh = ops.replace_between_markers(text, ops.markdown(cells), "README.md")
    assert text == fresh, "refresh it with: ops-math ops --markdown --update README.md"


@pytest.mark.slow
def test_every_operator_runs_everywhere_in_every_everyday_dtype(cells):
    for name in catalog.operators():
        for device in ops.HEADINGS:
            for dtype in ops.EVERYDAY:
                able = [
                    cell for cell in cells if (cell.operator, cell.device, cell.dtype) == (name, device, dtype) and cell.support == "all"
                ]
                assert able, f"{name} has calls on {device} in {dtype} that no single implementation takes"


@pytest.mark.slow
def test_every_cell_that_is_not_full_says_why(cells):
    assert {cell.support for cell in cells} == {"all", "some", "none"}
    assert [cell for cell in cells if (cell.support == "all") != (cell.reasons == ())] == []


@pytest.mark.slow
def test_triton_kernels_are_not_offered_on_the_cpu(cells):
    on_cpu = [cell for cell in cells if cell.implementation == "triton_gpu" and cell.device == "cpu"]
    assert {cell.support for cell in on_cpu} == {"none"}
    assert {cell.reasons for cell in on_cpu} == {("Triton kernels need a GPU, this is cpu",)}


class Picky(Implementation):
    """Takes even problems."""

    def optional(self, attribute, default):
        return {"supports": lambda problem, device, phase: "odd" if problem % 2 else None}.get(attribute, default)


@pytest.mark.parametrize(
    ("posed", "support", "reasons"),
    [([2, 4], "all", ()), ([2, 3], "some", ("odd",)), ([1, 3], "none", ("odd",))],
)
def test_a_cell_tells_all_some_and_none_apart(posed, support, reasons):
    found = ops.cell(Picky("rope", "vendor", "nowhere"), backends.NAMED["h200"], "cuda", "bf16", [("fwd", problem) for problem in posed])
    assert (found.support, found.reasons) == (support, reasons)


@pytest.mark.parametrize(
    ("support", "short"),
    [
        (("all", "all", "all", "none"), "eager"),
        (("all", "all", "all", "all"), "eager⁺"),
        (("some", "all", "all", "none"), r"eager\*"),
        (("some", "all", "all", "some"), r"eager⁺\*"),
        (("none", "all", "all", "none"), "eager (bf16 fp16)"),
        (("none", "none", "none", "none"), ""),
    ],
)
def test_the_readme_names_only_what_differs_from_the_everyday_dtypes(support, short):
    assert ops.in_short("eager", dict(zip(ops.DTYPES, support, strict=True))) == short


def test_text_around_the_markers_stays():
    text = f"before\n{ops.BEGIN}\nold\n{ops.END}\nafter\n"
    assert ops.replace_between_markers(text, "new", "a.md") == f"before\n{ops.BEGIN}\nnew\n{ops.END}\nafter\n"


@pytest.mark.parametrize("text", ["nothing", f"{ops.BEGIN}", f"{ops.END}\n{ops.BEGIN}", f"{ops.BEGIN}{ops.END}" * 2])
def test_a_file_without_one_pair_of_markers_is_refused(text):
    with pytest.raises(checks.ArgumentError) as error:
        ops.replace_between_markers(text, "new", "a.md")
    wanted = f"a file with one {ops.BEGIN} and, after it, one {ops.END}"
    assert str(error.value) == f"ops: --update must be {wanted}; got a.md. Put both markers where the matrix belongs."


@pytest.mark.slow
def test_the_command_prints_json_markdown_and_a_table():
    shown = CliRunner().invoke(application, ["ops", "--json"])
    assert shown.exit_code == 0
    assert {"rms_norm", "triton_gpu"} <= {value for row in json.loads(shown.stdout) for value in (row["operator"], row["implementation"])}
    assert CliRunner().invoke(application, ["ops", "--markdown"]).stdout.startswith("| functions | CPU |")
    assert "rms_norm" in CliRunner().invoke(application, ["ops"]).stdout


def test_update_without_markdown_is_refused_in_words():
    result = CliRunner().invoke(application, ["ops", "--update", "README.md"])
    assert isinstance(result.exception, checks.ArgumentError)
