"""The launchers, with programs in their place that only write how they are called."""

import contextlib
import io
import os
import re
from pathlib import Path
from unittest import mock

from tests.lib.project import ROOT
from verl_ext.__main__ import main

LAUNCH = ROOT / "launch"


def launch(*words: str, command: str = "launch", **environment: str) -> tuple[int, str, str]:
    """Return the code, the output and the errors of a dry run without this process's topology."""
    clean = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "DRY_RUN": "1"}
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, clean | environment, clear=True),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = main([command, *words])
    return code, output.getvalue(), errors.getvalue()


def launch_by(script: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """Return what a script that only calls a command does in a dry run."""
    call = re.search(r'^exec verl-ext ([\w-]+) "\$@"\n\Z', script.read_text(), re.MULTILINE)
    assert call, script
    return launch(*words, command=call[1], **environment)
