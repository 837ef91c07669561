"""What every test needs: verl on CPU, quiet progress bars, small models written once."""

import os
import resource
import socket
import tempfile
from contextlib import contextmanager

os.environ["VERL_PLATFORM"] = "cpu"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "HF_DATASETS_CACHE" not in os.environ:  # what tests keep there is of no use to anybody else
    _cache = tempfile.TemporaryDirectory(prefix="verl_ext_tests_")
    os.environ["HF_DATASETS_CACHE"] = _cache.name

import pytest
from hypothesis import settings

from tests.tiny_model import write_tiny_model

settings.register_profile("tests", deadline=None)  # a busy machine fails no property
settings.load_profile("tests")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a two-layer Qwen3 with a tokenizer of 128 tokens; 4 heads, 2 key/value heads."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def files_end_at():
    """A context in which a write beyond so many bytes of a file fails, as it does on a full disk: with an error number
    and without the file's name."""

    @contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def free_port():
    """A TCP port of this machine that nobody listens on, as a string."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
