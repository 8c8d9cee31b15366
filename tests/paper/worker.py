"""A process for the tests: runs scripts with small networks, one after the other.

    python worker.py '[["train_cifar10.py", "--epochs", "2"], ...]'

The status is that of the last script. A process counts as dead sooner than for users.
"""

import contextlib
import json
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import options
from models import PREACT_RESNETS, RESNETS, PreActResNet, ResNet


@contextlib.contextmanager
def small_networks() -> Iterator[None]:
    """Under the name "small", networks of one or two blocks, which compile in
    seconds."""
    preact = partial(PreActResNet, (1, 1), (4, 8), stem_strides=2)
    with (
        mock.patch.dict(PREACT_RESNETS, small=preact),
        mock.patch.dict(RESNETS, small=partial(ResNet, (1,), 2)),
    ):
        yield


if __name__ == "__main__":
    options.HEARTBEAT = 10
    status = None
    with small_networks():
        for script, *arguments in json.loads(sys.argv[1]):
            sys.argv, status = [script, *arguments], None
            try:
                runpy.run_path(
                    str(Path(options.__file__).with_name(script)), run_name="__main__"
                )
            except SystemExit as error:
                print(error, flush=True)
                status = error.code
    sys.exit(status)
