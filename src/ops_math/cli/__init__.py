"""The command line, `ops-math`. Its libraries are imported here and nowhere else, so that `import ops_math` needs torch alone."""


def main() -> None:
    """Run the `ops-math` command line."""
    from ops_math.cli.app import run

    run()
