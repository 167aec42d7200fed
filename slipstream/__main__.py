"""``python -m slipstream`` and ``slipstream``: the command line (``slipstream.cli``)."""

from slipstream.cli.commands import main

if __name__ == "__main__":
    main()
