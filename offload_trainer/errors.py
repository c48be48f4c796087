"""What can stop a run, and the exit code that each kind ends the process with.

A message says what happened, the numbers, and what to do. Only these are shown without a traceback.
"""


class TrainerError(Exception):
    """Something stopped the run that is not a bug here: exit code 1."""

    exit_code = 1


class UserError(TrainerError):
    """A mistake of the user's, or a refused plan: exit code 2, and nothing has been written."""

    exit_code = 2


class Interrupted(TrainerError):
    """A signal asked the run to stop and everything is saved: 130 after SIGINT, 143 after SIGTERM."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number
