"""``python -m slipstream`` and ``slipstream``: the command line (``slipstream.cli``)."""

import os
import signal
import sys
from importlib import import_module

EXTRAS = ("gguf", "grpc_health", "grpc_reflection", "httptools", "jinja2", "llguidance", "orjson", "psutil", "rich",
          "safetensors", "starlette", "torch", "transformers", "typer", "uvicorn")


def main(service: str = "") -> None:
    """Run the command line, or ``service``, a package. Extras bring what commands and services need: an image of a
    router has no torch, and what only follows sessions has none."""
    if os.getpid() == 1:  # of a container: it gets no signal that it does not ask for, and did not end while it loads
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if service:
            import_module("slipstream.cli.process").main(service, import_module(f"{service}.__main__").serve)
        else:
            import_module("slipstream.cli.commands").main()
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        sys.exit(f"this command needs {error.name}; run: pip install 'slipstream[router,engine]'")
    except KeyboardInterrupt:  # while modules are imported; later typer takes it, with the same code
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
