"""`verl-ext chat` at a terminal: Ctrl-C drops the line, a turn that cannot be answered is named, Ctrl-D leaves."""

import os
import pty
import sys

import pytest

from tests.lib.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
CTRL_C, CTRL_D = b"\x03", b"\x04"


def read_to(terminal: int, end: bytes) -> str:
    """Read what the program prints, up to `end`."""
    printed = b""
    while not printed.endswith(end):
        printed += os.read(terminal, 1)
    return printed.decode()


def test_a_conversation_goes_on_after_ctrl_c_and_after_a_turn_that_does_not_fit(tmp_path):
    folder = write_tiny_model(tmp_path, max_position_embeddings=24)
    words = [sys.executable, "-m", "verl_ext", "chat", str(folder), "temperature=0", "max_new_tokens=2"]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(words[0], words)
    read_to(terminal, b"> ")
    os.write(terminal, b"w3 w4" + CTRL_C)
    read_to(terminal, b"> ")
    os.write(terminal, b"w5 " * 24 + b"\n")
    assert "error: the conversation must" in read_to(terminal, b"\n> ")
    os.write(terminal, b"w7\n")
    answered = read_to(terminal, b"\n> ").splitlines()
    assert len(answered[1].split()) == 2, answered  # the two lines before it are no part of the conversation
    os.write(terminal, CTRL_D)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
