"""Writes the tables of `ops_math.blocks.parts` into the page that asks for them, so that page and code cannot differ."""

from typing import Any

from ops_math.blocks import parts

ROLES = {"norm": "norm", "attention": "attention", "mlp": "MLP", "layer": "layer"}


def short(name: str) -> str:
    """`transformers` or `torch.nn`, and the class."""
    owner = {"torch": "torch.nn", "transformers": "transformers", "ops_nn": ".".join(name.split(".")[:2])}[name.split(".")[0]]
    return f"`{owner}.{name.split('.')[-1]}`"


def modules_table() -> str:
    """Which modules are known, and what is read from them."""
    lines = ["| used as | modules | what is read |", "|---|---|---|"]
    for part in parts.TABLE:
        if part.role in ROLES:
            lines.append(f"| {ROLES[part.role]} | {', '.join(dict.fromkeys(map(short, part.classes)))} | {part.reads} |")
    return "\n".join(lines)


def keywords_table() -> str:
    """Which keyword arguments a block understands besides the module's own."""
    lines = ["| keyword | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in {**parts.BLOCK_KEYWORDS, **parts.BRANCH_KEYWORDS}.items()]
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return markdown.replace("<!-- table of modules -->", modules_table()).replace("<!-- table of keywords -->", keywords_table())
