"""The options and errors that all scripts share."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import command_line
import figures
import pytest
import train_cifar10
import train_imagenet
from helpers import environment

SCRIPTS = [figures, train_cifar10, train_imagenet]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_help(script: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option says what it is, and what it is if not given."""
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    text = capsys.readouterr().out
    options = re.split(r"\n  (?=-)", text[text.index("options:") :].partition("\n\n")[0])[1:]
    for option in options:
        assert re.search(r"\s{2,}\S", option), option  # a help
        assert "None" not in option
        assert "False" not in option
    assert any("(default:" in option for option in options)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (figures, ["--seeds", "0"], "--seeds must be finite and > 0, got 0"),
        (figures, ["--out", "FILE"], "--out must be a folder that can be written, got"),
        (train_cifar10, ["--out", "FILE/new"], "--out must be a folder that can be written, got"),
    ],
)
def test_bad_arguments(
    script: object,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Found before anything is computed or written."""
    file = tmp_path / "FILE"
    file.write_text("")
    with pytest.raises(SystemExit, match="2"):
        script.main([argument.replace("FILE", str(file)) for argument in arguments])
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_errors_of_the_user_and_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    """Only errors that the user can correct come without a traceback."""

    def main(error: Exception) -> None:
        raise error

    for error in (command_line.UserError("wrong"), ConnectionError("wrong"), OSError("wrong")):
        with pytest.raises(SystemExit, match=r"^error: wrong$"):
            command_line.run(lambda error=error: main(error))
    with pytest.raises(ValueError, match="a bug"):
        command_line.run(lambda: main(ValueError("a bug")))


def test_ctrl_c() -> None:
    """It ends the process where an exception would be ignored, and nothing runs at exit."""
    script = """if True:
        import atexit
        import os
        import signal
        import command_line

        class Deleted:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)

        def main():
            Deleted()
            print("after")

        atexit.register(print, "at exit")
        command_line.run(main)
    """
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
