"""Entry point of `offload-train` and `python -m offload_trainer`.

While the package is being imported, Ctrl-C ends the process without a traceback. An import that fails because a
required package is missing or too old prints one line and exits with 1.
"""

import signal
import sys


def main() -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from offload_trainer.cli import main as command
    except ImportError as error:
        from offload_trainer.common.errors import explain

        if (message := explain(error)) is None:
            raise
        print(f"offload-train: {message}", file=sys.stderr)
        return 1
    return command()


if __name__ == "__main__":
    sys.exit(main())
