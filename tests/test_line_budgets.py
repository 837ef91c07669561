from pathlib import Path

import pytest

from tests.line_budgets import problems


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    (folder / "room").mkdir(parents=True)
    (folder / "room" / "one.py").write_text("1\n" * 3)
    (folder / "room" / "two.py").write_text("1\n" * 5)
    (folder / "beside.py").write_text("1\n")
    return folder


def budgets(module: int = 5, rooms: dict | None = None, **long_modules: int) -> dict:
    return {"module": module, "rooms": rooms or {"room": 8, "modules": 1}, "long_modules": long_modules}


def test_rooms_within_their_budgets_have_no_problem(package):
    assert not [*problems(package, budgets())]


def test_a_room_above_its_budget_is_named_with_both_numbers(package):
    (line,) = problems(package, budgets(rooms={"room": 7, "modules": 1}))
    assert "rooms.room" in line
    assert "7" in line
    assert "8" in line


@pytest.mark.parametrize("rooms", [{"room": 8}, {"room": 8, "modules": 1, "gone": 5}])
def test_the_table_has_exactly_the_rooms_that_exist(package, rooms):
    (line,) = problems(package, budgets(rooms=rooms))
    assert "modules" in line or "gone" in line


def test_a_long_module_is_a_problem_unless_it_is_listed(package):
    (line,) = problems(package, budgets(module=4))
    assert "room/two.py" in line
    assert not [*problems(package, budgets(module=4) | {"long_modules": {"room/two.py": 5}})]


def test_a_listed_module_may_not_grow_and_leaves_the_list_when_it_is_short(package):
    (grown,) = problems(package, budgets(module=3) | {"long_modules": {"room/two.py": 4}})
    assert "room/two.py" in grown
    (short,) = problems(package, budgets() | {"long_modules": {"room/two.py": 6}})
    assert "remove the entry" in short
