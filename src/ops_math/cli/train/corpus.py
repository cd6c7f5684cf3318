"""The text to learn from: a file, a folder of files, or what every CPython ships."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ops_math import checks
from ops_math.cli.train.config import COMMAND

HELD_OUT = 0.05
# Tests and vendored packages are no documentation, and whether they are installed differs from machine to machine.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "pydoc_data", "turtledemo"}
SMALLEST_DOCSTRING = 80

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Document(NamedTuple):
    """A piece of text that belongs together."""

    name: str
    text: str


class Corpus(NamedTuple):
    """Text to learn from and text held out.

    Attributes:
        source: where it is from, in words.
        train: documents to learn from.
        held_out: the tail, about 5 % of the characters, that is only ever evaluated.
    """

    source: str
    train: list[Document]
    held_out: list[Document]

    @property
    def characters(self) -> int:
        """Length of all text [characters]."""
        return sum(len(document.text) for document in (*self.train, *self.held_out))


def load(path: Path | None) -> Corpus:
    """Read the text and hold its tail out.

    Args:
        path: a text file, a folder whose files are read in the order of their names, or None for CPython's own
            documentation.

    Raises:
        ArgumentError: when there is nothing there, or something that is not text.
    """
    if path is None:
        documents, source = list(python_documentation()), "CPython's language reference and the docstrings of its standard library"
    elif path.is_dir():
        documents, source = list(_folder(path)), str(path)
    elif path.is_file():
        documents, source = [Document(path.name, read_text(path))], str(path)
    else:
        got = f"{path}, which is neither" if path.exists() else f"{path}, which does not exist"
        checks.fail(
            COMMAND, "--data", "a text file or a folder of text files", got, "Correct the path, or leave --data out for built-in text."
        )
    return Corpus(source, *split(documents))


def read_text(path: Path) -> str:
    """The text of one file, which must be non-empty UTF-8 without NUL bytes."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        checks.fail(COMMAND, "--data", "readable", f"{path} ({error.strerror})", "Change its permissions or name another file.")
    advice = "Give plain text in UTF-8."
    if b"\0" in raw:
        checks.fail(COMMAND, "--data", "text", f"{path}, which is binary (a NUL byte at offset {raw.index(0)})", advice)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        checks.fail(
            COMMAND, "--data", "text in UTF-8", f"{path}, which is not (byte 0x{raw[error.start]:02x} at offset {error.start})", advice
        )
    if not text.strip():
        checks.fail(COMMAND, "--data", "text", f"{path}, which is empty", advice)
    return text


def _folder(folder: Path) -> Iterator[Document]:
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        checks.fail(COMMAND, "--data", "a folder with text files in it", f"{folder}, which has none", "Put text files into it.")
    for path in files:
        yield Document(path.relative_to(folder).as_posix(), read_text(path))


def split(documents: list[Document], held_out: float = HELD_OUT) -> tuple[list[Document], list[Document]]:
    """Cut the last part off, at a line's end inside the document where the cut falls."""
    wanted = sum(len(document.text) for document in documents) * (1.0 - held_out)
    train: list[Document] = []
    for index, document in enumerate(documents):
        if wanted > len(document.text):
            train.append(document)
            wanted -= len(document.text)
            continue
        text = document.text
        cut = text.find("\n", int(wanted)) + 1 or text.find(" ", int(wanted)) + 1 or int(wanted)
        head = [Document(document.name, text[:cut])] if cut else []
        tail = [Document(document.name, text[cut:])] if cut < len(text) else []
        return train + head, tail + documents[index + 1 :]
    return train, []


def python_documentation() -> Iterator[Document]:
    """Docstrings of the standard library, module by module, and the language reference that `help()` shows.

    Source files are parsed, never imported, and visited in the order of their names, so that one CPython gives one text.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    topics = library / "pydoc_data" / "topics.py"
    if not topics.is_file():
        checks.refuse(
            f"{COMMAND}: the built-in text",
            f"this Python keeps no sources of its standard library in {library}",
            "Give a text file or a folder with --data",
        )
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]) and (text := docstrings(path)):
            yield Document(relative.as_posix(), text)
    for name, text in sorted(reference_topics(topics).items()):
        yield Document(f"reference/{name}", text)


def docstrings(path: Path) -> str:
    """Signatures and docstrings of one source file, in order; "" for a file that this Python cannot parse."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        # The standard library ships files in other encodings and broken on purpose; they hold no documentation.
        return ""
    parts = []
    for node in _documented(tree):
        text = ast.get_docstring(node)
        if text is None or len(text) < SMALLEST_DOCSTRING:
            continue
        heading = f"# {path.stem}" if isinstance(node, ast.Module) else _heading(node)
        parts.append(f"{heading}\n{text}\n")
    return "\n".join(parts)


def _documented(node: Documented) -> Iterator[Documented]:
    """The node and the classes and functions below it, in order; functions inside functions are not documentation."""
    yield node
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _documented(child)


def _heading(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    return f"def {node.name}({', '.join(argument.arg for argument in node.args.args)})"


def reference_topics(path: Path) -> dict[str, str]:
    """The dictionary `topics` that a source file assigns, read as a literal."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "topics" for target in node.targets):
            topics: dict[str, str] = ast.literal_eval(node.value)
            return topics
    checks.refuse(f"{COMMAND}: the built-in text", f"{path} assigns no `topics`", "Give a text file or a folder with --data")
