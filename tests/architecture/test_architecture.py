"""The tree keeps to the architecture: who may import whom, file names, sizes, and an import that costs nothing."""

import ast
import functools
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tests.architecture import rules

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
SIZE_RULES = (rules.file_name, rules.file_length, rules.function_length)


@functools.cache
def sources(*folders: str) -> list[rules.Source]:
    """Every Python file below `src` (named from there), or below other folders (named from the root)."""
    base = ROOT if folders else SRC
    files = [file for folder in folders or (".",) for file in sorted((base / folder).rglob("*.py"))]
    return [rules.parse(file.relative_to(base).as_posix(), file.read_text()) for file in files]


def public_names() -> set[str]:
    """What `ops_math.__all__` lists, read without importing it, and the testing package."""
    tree = ast.parse((SRC / "ops_math" / "__init__.py").read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return {*ast.literal_eval(lists[0]), "testing"}


@pytest.mark.parametrize("rule", [*rules.FILE_RULES, rules.public_names_only(public_names())], ids=lambda rule: rule.__name__)
def test_no_file_of_the_packages_breaks_a_rule(rule):
    files = sources()
    assert len(files) > 20
    held = [source for source in files if (rule.__name__, str(source.path)) not in rules.EXCEPTIONS]
    assert [str(violation) for source in held for violation in rule(source)] == []


@pytest.mark.parametrize(("name", "path"), sorted(rules.EXCEPTIONS))
def test_an_exception_is_still_needed(name, path):
    assert list(getattr(rules, name)(rules.parse(path, (SRC / path).read_text())))


@pytest.mark.parametrize(("path", "what"), sorted(rules.BARE_COPIES))
def test_a_copy_that_needs_no_note_is_still_made(path, what):
    assert what in {found for found, _ in rules.bare_copies(rules.parse(path, (SRC / path).read_text()))}


@pytest.mark.parametrize("rule", SIZE_RULES, ids=lambda rule: rule.__name__)
def test_tests_examples_and_benchmarks_keep_to_the_same_sizes(rule):
    files = sources("tests", "examples", "benchmarks", "scripts", "tools")
    assert [str(violation) for source in files for violation in rule(source)] == []


def test_the_operator_folders_are_those_of_the_catalogue_and_the_few_outside_it():
    from ops_math import catalog

    paths = [PurePosixPath(file.relative_to(SRC).as_posix()) for file in SRC.rglob("*.py")]
    folders = {module.split(".")[2] for _, module in catalog.CATALOG}
    assert folders.isdisjoint(rules.OUTSIDE_CATALOGUE)
    assert [str(violation) for violation in rules.operator_folders(paths, folders | rules.OUTSIDE_CATALOGUE.keys())] == []


IMPORT_PROBE = """
import importlib.abc, os, sys, traceback
import torch

allowed = set(sys.stdlib_module_names) | {name.partition(".")[0] for name in sys.modules} | {"ops_math", "torch"}
allowed -= {"triton"}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ImportError(f"ops_math asked for {name}")

sys.meta_path.insert(0, Refuse())
reads = []

class Recording(type(os.environ)):
    def __getitem__(self, key):
        files = [frame.filename for frame in traceback.extract_stack()[:-1]]
        callers = [file for file in files if "_collections_abc" not in file and not file.endswith("os.py")]
        if "ops_math" in callers[-1]:
            reads.append((key, callers[-1]))
        return super().__getitem__(key)

os.environ.__class__ = Recording
triton_before = "triton" in sys.modules
import ops_math
assert reads == [], f"the environment was read: {reads}"
assert not torch.cuda.is_initialized(), "a CUDA context was made"
assert ("triton" in sys.modules) == triton_before, "Triton was imported"
"""


def run_probe(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SRC, timeout=120, check=False)


def test_importing_ops_math_takes_torch_alone_reads_no_environment_and_starts_no_device():
    result = run_probe(IMPORT_PROBE)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guilty", "words"),
    [
        ("import os; exec(compile('os.environ.get(\"HOME\")', 'ops_math/guilty.py', 'exec'))", "the environment was read"),
        ("import rich", "ops_math asked for rich"),
    ],
)
def test_the_import_probe_notices_a_guilty_import(guilty, words):
    result = run_probe(IMPORT_PROBE.replace("import ops_math\n", guilty + "\n"))
    assert result.returncode != 0
    assert words in result.stderr
