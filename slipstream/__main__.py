"""``python -m slipstream`` and ``slipstream``: the command line (``slipstream.cli``)."""

import sys


def main() -> None:
    """The extra ``service`` brings what the command line needs; what only follows sessions does without it."""
    try:
        from slipstream.cli.commands import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs {error.name}; run: pip install 'slipstream[router,engine]'")
    run()


if __name__ == "__main__":
    main()
