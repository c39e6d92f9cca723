"""``python -m memcore``: see :mod:`memcore.cli`."""

import sys


def run() -> int:
    """The command's exit status; an interrupt while its modules are still being imported is quiet too."""
    try:
        from memcore.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
