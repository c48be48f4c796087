"""The command's process. Until there is something to tidy up, Ctrl-C ends it as any program, without a traceback."""

import signal
import sys


def main() -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from offload_trainer.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
