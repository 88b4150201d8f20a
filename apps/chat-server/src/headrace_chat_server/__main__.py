"""Entry point of `headrace` and `python -m headrace_chat_server`."""

import signal
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from headrace_chat_server.cli import main as run
    except KeyboardInterrupt:
        # Ctrl-C while the command line is still being imported: no traceback, and the code that shells expect.
        sys.exit(128 + signal.SIGINT)
    sys.exit(run())


if __name__ == "__main__":
    main()
