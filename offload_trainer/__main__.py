"""The command's process. Until there is something to tidy up, Ctrl-C ends it as any program, without a traceback."""

import signal
import sys


def main() -> int:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from offload_trainer.cli import main as command
    except ImportError as error:
        from offload_trainer.errors import explain

        if (told := explain(error)) is None:
            raise
        print(f"offload-train: {told}", file=sys.stderr)
        return 1
    return command()


if __name__ == "__main__":
    sys.exit(main())
