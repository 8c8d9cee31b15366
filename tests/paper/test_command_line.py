"""How all scripts end: errors of the user, bugs and Ctrl-C."""

import signal
import subprocess
import sys

import command_line
import pytest
from helpers import environment


def test_errors_of_the_user_and_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    """Only errors that the user can correct come without a traceback."""

    def main(error: Exception) -> None:
        raise error

    for error in (command_line.UserError("wrong"), OSError("wrong")):
        with pytest.raises(SystemExit, match=r"^error: wrong$"):
            command_line.run(lambda error=error: main(error))
    with pytest.raises(ValueError, match="a bug"):
        command_line.run(lambda: main(ValueError("a bug")))


def test_ctrl_c() -> None:
    """It ends the process where an exception would be ignored, and nothing runs at exit."""
    script = """if True:
        import atexit, command_line, os, signal

        class Deleted:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)

        atexit.register(print, "at exit")
        command_line.run(Deleted)
    """
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
