"""The checks of `make lint` that are our own: line budgets, public names that stand once, durations of tests."""

from pathlib import Path

import pytest

from tests import durations
from tests.line_budgets import lowered, problems
from tests.public_names import repeated


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with rooms of 8 lines and of 1, tests of 2 and benchmarks of none."""
    for name, lines in {
        "verl_ext/room/one": 3,
        "verl_ext/room/two": 5,
        "verl_ext/beside": 1,
        "tests/test_one": 2,
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n" * lines)
    return tmp_path


def budgets(**rooms: dict[str, int]) -> dict:
    return {"module": 5, "rooms": {"room": {"target": 8}, "modules": {"target": 1}, "tests": {"target": 2}} | rooms}


@pytest.mark.parametrize(
    ("rooms", "parts"),
    [
        ({}, None),
        ({"room": {"target": 5, "present": 8}}, None),
        ({"room": {"target": 7}}, ["rooms.room allows 7", "has 8"]),
        ({"room": {"target": 5, "present": 7}}, ["rooms.room allows 7", "has 8"]),
        ({"room": {"target": 5, "present": 9}}, ["rooms.room.present can be lowered from 9", "has 8"]),
        ({"room": {"target": 8, "present": 8}}, ["rooms.room.present can be lowered"]),
        ({"tests": {"target": 1}}, ["rooms.tests allows 1"]),
        ({"gone": {"target": 5}}, ["rooms.gone names no room"]),
    ],
)
def test_a_room_may_not_exceed_the_larger_of_its_target_and_its_present_size(project, rooms, parts):
    found = [*problems(project, budgets(**rooms))]
    assert len(found) == (parts is not None)
    assert all(part in found[0] for part in parts or ())


def test_a_room_without_a_target_and_a_long_module_are_named(project):
    del (given := budgets())["rooms"]["modules"]
    assert "rooms.modules must state a target" in next(problems(project, given))
    assert [*problems(project, budgets() | {"module": 4})] == ["verl_ext/room/two.py may have 4 lines; it has 5"]


def test_present_sizes_are_lowered_and_never_raised():
    text = 'a = { target = 5, present = 9 }\n"t/b" = { target = 5, present = 9 }\nc = { target = 5, present = 6 }\n'
    expected = 'a = { target = 5, present = 8 }\n"t/b" = { target = 5 }\nc = { target = 5, present = 6 }\n'
    assert lowered(text, {"a": 8, "t/b": 4, "c": 7}) == expected


def test_a_public_name_of_two_modules_is_named_with_both(tmp_path):
    (tmp_path / "one.py").write_text("def read(): ...\ndef main(): ...\ndef _own(): ...\nclass Kept: ...\n")
    (tmp_path / "two.py").write_text("class read: ...\ndef main(): ...\ndef _own(): ...\n")
    assert [*repeated(tmp_path)] == ["read must be defined once; got one.py, two.py"]


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one[1]" time="8.0"/>
<testcase classname="tests.test_a" name="test_two" time="3.5"/>
<testcase classname="tests.test_b" name="test_one" time="30.0"><properties><property name="slow" value="true"/>
</properties></testcase>
<testcase classname="tests.gpu.test_c" name="test_one" time="1"><failure message=""/></testcase>
</testsuite></testsuites>"""


def test_files_have_the_sums_of_their_tests_with_and_without_the_slow_ones():
    seconds = durations.measured(REPORT)
    assert seconds == {"test_a.py": (11.5, 11.5), "test_b.py": (30.0, 0.0), "gpu/test_c.py": (1.0, 1.0)}
    rows = [line for line in durations.table(seconds).splitlines() if ".py |" in line]
    assert rows == ["| test_b.py | 30.0 | 0.0 |", "| test_a.py | 11.5 | 11.5 |", "| gpu/test_c.py | 1.0 | 1.0 |"]


def test_a_quick_file_above_the_limit_is_a_problem_until_it_is_marked_and_a_row_needs_its_file(tmp_path):
    page = durations.table(durations.measured(REPORT))
    (tmp_path / "test_a.py").write_text("import pytest\n")
    (tmp_path / "test_b.py").write_text("import pytest\n")
    slow, gone = durations.problems(page, tmp_path)
    assert "test_a.py must be marked slow or take at most 10 seconds; it takes 11.5" in slow
    assert "gpu/test_c.py, which does not exist" in gone
    (tmp_path / "test_a.py").write_text("pytestmark = [pytest.mark.slow, pytest.mark.skipif(True)]\n")
    assert len([*durations.problems(page, tmp_path)]) == 1
