"""``python -m slipstream`` and ``slipstream``: the command line (``slipstream.cli``)."""

import sys

EXTRAS = ("gguf", "grpc_health", "grpc_reflection", "httptools", "jinja2", "llguidance", "orjson", "psutil", "rich",
          "safetensors", "starlette", "torch", "transformers", "typer", "uvicorn")


def main() -> None:
    """Extras bring what commands need: an image of a router has no torch, and what only follows sessions has none."""
    try:
        from slipstream.cli.commands import main as run

        run()
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        sys.exit(f"this command needs {error.name}; run: pip install 'slipstream[router,engine]'")


if __name__ == "__main__":
    main()
