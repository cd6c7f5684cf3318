"""The architecture as functions: each takes the source of one file and yields what breaks the rule, by line.

They read syntax trees, not text, so that a word in a comment or a string breaks nothing and an import inside a function is seen.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

# "About" 400, 600 and 60: a twentieth more is let through, so that one line of a docstring forces nobody to split a file.
HOST_LINES, KERNEL_LINES, FUNCTION_LINES, KERNEL_FUNCTION_LINES = 420, 630, 63, 200

REQUIRED_FILES = ("reference", "problem", "op", "plain", "eager", "levels", "triton_gpu")
# Two operators that share a folder have files of their own by a suffix (`op_linear.py`); a long file splits along `_fwd` and `_bwd`.
OPERATOR_FILE = re.compile(
    r"__init__|(reference|problem|op|plain|eager|inductor|vendor|levels|triton_[a-z]+)(_[a-z]+)?(_fwd|_bwd)?|test_[a-z0-9_]+"
)
VAGUE_NAME = re.compile(r"utils?|common|helpers?|misc|.*_(utils?|common|helpers?|misc|v\d+|new|old)")

# Operator folders that the catalogue does not name, and why: the conformance suite runs what it names.
OUTSIDE_CATALOGUE = {
    "adamw": "steps lists of tensors in place and has no backward, so it has no dispatcher operators to conform",
    "figures": "keeps rows of many calls for a trace and returns nothing that a model computes with",
}

# What each part of ops_math may import of ops_math, besides itself. A name stands for the module and all below it.
FOUNDATION = ("spec", "checks", "settings", "stats", "features", "files", "_version")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "spec": (),
    "checks": ("spec",),
    "keywords": ("spec", "checks", "features"),
    "settings": ("spec", "checks", "features"),
    "stats": ("spec",),
    "features": ("spec",),
    "files": (),
    "backends": FOUNDATION,
    "schedule": (*FOUNDATION, "backends", "rng"),
    "layout": (*FOUNDATION, "backends"),
    "graphs": FOUNDATION,
    "repeatable": FOUNDATION,
    "precision": (*FOUNDATION, "backends"),
    "profiling": (*FOUNDATION, "backends"),
    "backward": FOUNDATION,
    "usual": (*FOUNDATION, "backends"),
    "dispatch": (*FOUNDATION, "backends", "schedule", "layout", "precision", "backward", "usual"),
    "rng": FOUNDATION,
    "recompute": FOUNDATION,
    "catalog": (*FOUNDATION, "dispatch"),
    "ops": (*FOUNDATION, "backends", "schedule", "layout", "precision", "profiling", "dispatch", "usual", "rng", "recompute", "keywords"),
    "blocks": (*FOUNDATION, "backends", "schedule", "layout", "precision", "dispatch", "rng", "recompute", "ops", "debug", "keywords"),
    "_version": (),
    "registered": (*FOUNDATION, "backends", "schedule", "dispatch", "catalog", "testing"),
    "live_budget": (*FOUNDATION, "testing"),
    "debug": (*FOUNDATION, "keywords", "dispatch", "catalog", "rng", "live_budget"),
    "testing": (*FOUNDATION, "backends", "schedule", "layout", "precision", "dispatch", "rng"),
}
# These two may import whatever they like: the command line sits above all, and the package itself gathers the public names.
ABOVE_ALL = ("cli", "__init__")
# Elsewhere the library needs torch alone when it is imported; what serves the terminal stays in the command line.
TERMINAL_LIBRARIES = {"typer", "rich", "click", "jinja2", "matplotlib", "tokenizers"}


class Source(NamedTuple):
    """One Python file: its path below `src`, its text, its syntax tree."""

    path: PurePosixPath
    text: str
    tree: ast.Module

    @property
    def is_test(self) -> bool:
        """Whether the file holds tests."""
        return self.path.name.startswith("test_") or self.path.parts[0] == "tests"

    @property
    def is_kernel_file(self) -> bool:
        """Whether the file holds Triton kernels or tile functions."""
        return self.path.name.startswith("triton_") or "_tiles" in self.path.parts

    @property
    def part(self) -> str:
        """The part of its package that the file belongs to: `ops`, `schedule`, `spec`, ..."""
        return self.path.parts[1].removesuffix(".py") if len(self.path.parts) > 1 else ""

    @property
    def package(self) -> str:
        """`ops_math` or `ops_nn`."""
        return self.path.parts[0]


class Violation(NamedTuple):
    """A broken rule: where, and in words what."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class Import(NamedTuple):
    """One imported name: `from a.b import c` is module `a.b`, name `c`; `import a.b` has no name."""

    module: str
    name: str | None
    line: int
    at_import_time: bool


Rule = Callable[[Source], Iterator[Violation]]

# Rule and file, and why the rule cannot hold there. A test fails when one is no longer needed.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("layers", "ops_math/testing/interpreted.py"): "a program of its own, which is told operators by name",
    ("environment_in_settings", "ops_math/testing/interpreted.py"): "must set TRITON_INTERPRET before Triton is imported",
    ("light_import", "ops_math/testing/interpreter.py"): "repairs Triton's interpreter, which is written in numpy",
}


def imports(source: Source) -> Iterator[Import]:
    """Every import of a file, absolute, and whether importing the file runs it (not in a function, not for type checkers)."""
    return _imports_below(source.tree, source.path.with_suffix("").parts, True)


@functools.cache
def parse(path: str, text: str) -> Source:
    """Read one file."""
    return Source(PurePosixPath(path), text, ast.parse(text))


def _imports_below(node: ast.AST, parents: tuple[str, ...], at_import_time: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, child.lineno, at_import_time) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = parents[: len(parents) - child.level] if child.level else ()
            module = ".".join((*base, child.module) if child.module else base)
            yield from (Import(module, alias.name, child.lineno, at_import_time) for alias in child.names)
        elif not isinstance(child, ast.expr):
            yield from _imports_below(child, parents, at_import_time and not _defers(child))


def _defers(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _own_modules(found: Import) -> tuple[str, ...]:
    """The dotted path below `ops_math` that an import reaches; `from ops_math.ops import rope` reaches `ops.rope`."""
    parts = tuple(found.module.split("."))
    return parts[1:] + ((found.name,) if found.name else ())


def layers(source: Source) -> Iterator[Violation]:
    """Parts of ops_math import only what lies below them."""
    if source.package != "ops_math" or source.is_test or source.part in ABOVE_ALL:
        return
    allowed = MAY_IMPORT.get(source.part)
    if allowed is None:
        yield Violation(str(source.path), 1, f"{source.part} has no place in the order of layers: give it one in MAY_IMPORT")
        return
    for found in imports(source):
        root = found.module.split(".")[0]
        if root == "ops_nn":
            yield Violation(str(source.path), found.line, f"{source.part} imports {found.module}: ops_math does not know ops_nn")
        if root != "ops_math":
            continue
        reached = _own_modules(found)
        if not reached:
            yield Violation(str(source.path), found.line, "imports the package itself: name the module that is needed")
        elif reached[0] not in (source.part, *allowed):
            yield Violation(str(source.path), found.line, f"{source.part} may not import ops_math.{reached[0]}")


def operators_apart(source: Source) -> Iterator[Violation]:
    """No operator imports another; two that want the same arithmetic share a tile function."""
    if source.path.parts[:2] != ("ops_math", "ops") or len(source.path.parts) < 4:
        return
    own = source.path.parts[2]
    for found in imports(source):
        reached = _own_modules(found) if found.module.split(".")[0] == "ops_math" else ()
        if len(reached) > 1 and reached[0] == "ops" and reached[1] not in (own, "_tiles"):
            yield Violation(str(source.path), found.line, f"operator {own} imports operator {reached[1]}")


def public_names_only(public: Iterable[str]) -> Rule:
    """A rule for ops_nn: it uses ops_math as any user would."""
    names = set(public)

    def rule(source: Source) -> Iterator[Violation]:
        if source.package != "ops_nn":
            return
        for found in imports(source):
            if found.module.split(".")[0] != "ops_math":
                continue
            reached = _own_modules(found)
            if reached and reached[0] not in names:
                yield Violation(str(source.path), found.line, f"ops_math.{'.'.join(reached)} is not public")
            elif len(reached) > 1 and reached[0] != "testing":
                yield Violation(str(source.path), found.line, f"reaches into ops_math.{'.'.join(reached)}: use `import ops_math as om`")

    return rule


def light_import(source: Source) -> Iterator[Violation]:
    """Importing ops_math needs torch and the standard library; Triton is met in kernel files only, the terminal in cli only."""
    if source.package != "ops_math" or source.part == "cli" or source.is_test:
        return
    for found in imports(source):
        root = found.module.split(".")[0]
        if root in TERMINAL_LIBRARIES:
            yield Violation(str(source.path), found.line, f"{root} belongs to the command line")
        elif found.at_import_time and root == "triton" and not source.is_kernel_file:
            yield Violation(str(source.path), found.line, "imports Triton when it is itself imported: do it inside the function")
        elif found.at_import_time and root not in (*sys.stdlib_module_names, "torch", "triton", "ops_math", "__future__"):
            yield Violation(str(source.path), found.line, f"needs {root} when it is imported: do it inside the function")


def environment_in_settings(source: Source) -> Iterator[Violation]:
    """Only settings.py reads or writes environment variables."""
    if source.is_test or source.path == PurePosixPath("ops_math/settings.py"):
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os":
            yield Violation(str(source.path), node.lineno, f"os.{node.attr}: ask ops_math.settings")
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}:
            yield Violation(str(source.path), node.lineno, "imports the environment from os: ask ops_math.settings")


def launches_in_one_place(source: Source) -> Iterator[Violation]:
    """Only backends/launch.py starts a kernel."""
    if source.is_test or source.path == PurePosixPath("ops_math/backends/launch.py"):
        return
    knows_triton = any(found.module.split(".")[0] == "triton" for found in imports(source))
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        by_grid = isinstance(node.func, ast.Subscript) and (knows_triton or _final_name(node.func.value).endswith("kernel"))
        named_grid = any(keyword.arg == "grid" for keyword in node.keywords)
        by_method = named_grid and isinstance(node.func, ast.Attribute) and node.func.attr in ("run", "warmup")
        if by_grid or by_method:
            what = f"starts a kernel with `{ast.unparse(node.func)}(...)`: backends/launch.py does that"
            yield Violation(str(source.path), node.lineno, what)


def _final_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def errors_in_checks(source: Source) -> Iterator[Violation]:
    """Operators and blocks raise nothing themselves: checks.py writes the sentences."""
    if source.package != "ops_math" or source.part not in ("ops", "blocks") or source.is_test:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = _final_name(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            if isinstance(getattr(builtins, raised, None), type) or raised in ("ArgumentError", "UnsupportedError"):
                yield Violation(str(source.path), node.lineno, f"raises {raised}: use ops_math.checks")


# Copies that no report needs to name: of what has one dimension, or where the words after them say.
PARAMETER = "a parameter of one dimension"
BARE_COPIES: dict[tuple[str, str], str] = {
    ("ops_math/ops/adamw/eager.py", "value.contiguous()"): "bits of numbers that were just made, piece by piece",
    ("ops_math/ops/attention/eager.py", "x.to(dtype).contiguous()"): "gathers pieces of heads that fit a cache, whatever the strides are",
    ("ops_math/ops/attention/eager.py", "made.clone()"): "a piece of heads that fits a cache",
    ("ops_math/ops/cross_entropy/eager_linear.py", "none.clone()"): "an empty tensor",
    ("ops_math/ops/cross_entropy/triton_gpu.py", "class_weight.contiguous()"): PARAMETER,
    ("ops_math/ops/figures/eager.py", "torch.block_diag(*signs.view(PARTS, 1, -1).unbind()).contiguous()"): "a constant",
    ("ops_math/ops/figures/eager.py", "some.contiguous()"): "a constant",
    ("ops_math/ops/figures/op.py", "rows[:, -2:].contiguous()"): "two numbers a tensor",
    ("ops_math/ops/figures/triton_gpu.py", "gather[:, 2].clone()"): "a table of places",
    ("ops_math/ops/figures/triton_gpu.py", "t[::step].contiguous()"): "those numbers of many that are read",
    ("ops_math/ops/glu/triton_gpu_gelu.py", "bias.contiguous()"): PARAMETER,
    ("ops_math/ops/layer_norm/triton_gpu.py", "t.contiguous()"): PARAMETER,
    (
        "ops_math/ops/linear/eager.py",
        "t.clone(memory_format=torch.contiguous_format)",
    ): "a block of rows whose bits may not depend on where it lies",
    ("ops_math/ops/linear/triton_gpu.py", "bias.contiguous()"): PARAMETER,
    ("ops_math/ops/rms_norm/inductor.py", "weight.contiguous()"): PARAMETER,
    ("ops_math/ops/rms_norm/inductor.py", "rstd.contiguous()"): "one number a row",
    ("ops_math/ops/rms_norm/triton_gpu.py", "weight.contiguous()"): PARAMETER,
    ("ops_math/blocks/packing.py", "parameter.data.clone()"): "the user asked for it: unpack() gives parameters storages of their own",
}


def bare_copies(source: Source) -> Iterator[tuple[str, int]]:
    """What launchers and blocks copy without a note, as it is written, and where: `contiguous()` and `clone()` outside `copied(...)`."""
    if source.is_test or source.package != "ops_math" or source.part not in ("ops", "blocks"):
        return
    if source.path.stem.partition("_")[0] in ("reference", "problem", "plain"):
        return
    noted = {
        inner
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and _final_name(node.func) == "copied"
        for inner in ast.walk(node)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("contiguous", "clone"):
            if node not in noted:
                yield ast.unparse(node), node.lineno


def noted_copies(source: Source) -> Iterator[Violation]:
    """Every copy that a call makes because of strides is in `om.layout.report()`."""
    for what, line in bare_copies(source):
        if (str(source.path), what) not in BARE_COPIES:
            yield Violation(str(source.path), line, f"copies by `{what}` without a note: use ops_math.layout's dense or copied")


def file_name(source: Source) -> Iterator[Violation]:
    """Operator folders have fixed file names; no file or folder has a name that could hold anything."""
    for part in source.path.with_suffix("").parts:
        if VAGUE_NAME.fullmatch(part):
            yield Violation(str(source.path), 1, f"`{part}` says nothing about what is inside")
    if source.path.parts[:2] == ("ops_math", "ops") and len(source.path.parts) > 3 and "_tiles" not in source.path.parts:
        if len(source.path.parts) > 4:
            yield Violation(str(source.path), 1, "an operator's folder holds no folders")
        elif not OPERATOR_FILE.fullmatch(source.path.stem):
            yield Violation(str(source.path), 1, f"`{source.path.name}` is not a file that an operator has")


def file_length(source: Source) -> Iterator[Violation]:
    """A file can be read in one sitting."""
    limit = KERNEL_LINES if source.is_kernel_file else HOST_LINES
    lines = source.text.count("\n")
    if lines > limit:
        yield Violation(str(source.path), limit + 1, f"{lines} lines, and at most {limit} are allowed: split it where the subject changes")


def function_length(source: Source) -> Iterator[Violation]:
    """A function fits on a screen; its docstring does not count."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_kernel = any(_final_name(d.func if isinstance(d, ast.Call) else d) == "jit" for d in node.decorator_list)
        limit = KERNEL_FUNCTION_LINES if is_kernel else FUNCTION_LINES
        lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
        if lines > limit:
            yield Violation(str(source.path), node.lineno, f"{node.name} has {lines} lines, and at most {limit} are allowed")


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1


def operator_folders(paths: Iterable[PurePosixPath], catalogue: Iterable[str]) -> Iterator[Violation]:
    """The operator folders are those that the catalogue names, and each has the files that make an operator."""
    found: dict[str, set[str]] = {}
    for path in paths:
        if path.parts[:2] == ("ops_math", "ops") and len(path.parts) == 4 and path.parts[2] != "_tiles":
            found.setdefault(path.parts[2], set()).add(path.stem)
    named = set(catalogue)
    for folder in sorted(found.keys() ^ named):
        what = "has a folder and no line in the catalogue" if folder in found else "has a line in the catalogue and no folder"
        yield Violation(f"ops_math/ops/{folder}", 1, what)
    for folder in sorted(found.keys() & named):
        for stem in REQUIRED_FILES:
            if not {stem, f"{stem}_fwd"} & found[folder]:
                yield Violation(f"ops_math/ops/{folder}", 1, f"has no {stem}.py")
        if not any(stem.startswith("test_") for stem in found[folder]):
            yield Violation(f"ops_math/ops/{folder}", 1, f"has no test_{folder}.py")


# The rules that hold for every file on its own. `public_names_only` is added by the test, which knows the public names.
FILE_RULES: tuple[Rule, ...] = (
    layers,
    operators_apart,
    light_import,
    environment_in_settings,
    launches_in_one_place,
    errors_in_checks,
    noted_copies,
    file_name,
    file_length,
    function_length,
)
