"""The common set-up of all tests: verl on CPU, quiet progress bars, and small models written once."""

import os
import resource
import signal
import socket
import tempfile
from contextlib import contextmanager, suppress
from functools import partial

os.environ["VERL_PLATFORM"] = "cpu"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "HF_DATASETS_CACHE" not in os.environ:  # keeps the tests' entries out of the user's cache
    _cache = tempfile.TemporaryDirectory(prefix="verl_ext_tests_")
    os.environ["HF_DATASETS_CACHE"] = _cache.name

import psutil
import pytest
from hypothesis import settings

from tests.lib.tiny_model import write_tiny_model

settings.register_profile("tests", deadline=None)  # a busy machine must not fail a property
settings.load_profile("tests")
# The background job of a shell ignores interrupts, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Say in a report which tests are slow, for tests/lib/durations.py."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.user_properties.append(("slow", "true"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Kill the programs that a failed test left behind, such as a run that was to be stopped."""
    report = yield
    for process in psutil.process_iter() if report.failed else ():
        with suppress(psutil.Error):
            if process.environ().get("PYTEST_CURRENT_TEST", "").startswith(f"{item.nodeid} ("):
                process.kill()
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return the folder of a two-layer Qwen3 with 4 heads, 2 key/value heads and a tokenizer of 128 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def chatml(tmp_path_factory):
    """Return the folder of a tiny tokenizer with the ChatML template."""
    from tests.lib.chat_templates import CHATML, tiny_tokenizer

    folder = tmp_path_factory.mktemp("chatml")
    tiny_tokenizer(CHATML).save_pretrained(folder)
    return folder


@pytest.fixture
def synthesize(tmp_path, tiny_model):
    """Return `synthesized` for a test's folder and the tiny model."""
    from tests.lib.synthesized import synthesized  # imports what few tests need

    return partial(synthesized, tmp_path, tiny_model)


@pytest.fixture
def files_end_at():
    """Return a context in which a write beyond a file's first bytes fails as on a full disk: with an error number and
    without the file's name."""

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
    """Return an unused TCP port of this machine, as a string."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
