"""A short form of the fuzzing of readers; `make fuzz` is the long one."""

import pytest

from tests.lib.fuzz_readers import fuzz


@pytest.mark.parametrize("name", ["tokenized folder", "scanned folder", "index", "forged checkpoint"])
def test_damaged_and_forged_input_is_read_or_refused_in_one_line(name):
    counts, failure = fuzz(name, 0, 25)
    assert failure is None
    assert counts["refused"] > 0
