from tests.durations import measured, problems, table

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one[1]" time="8.0"/>
<testcase classname="tests.test_a" name="test_two" time="3.5"/>
<testcase classname="tests.test_b" name="test_one" time="30.0"><properties><property name="slow" value="true"/>
</properties></testcase>
<testcase classname="tests.gpu.test_c" name="test_one" time="1"><failure message=""/></testcase>
</testsuite></testsuites>"""


def test_files_have_the_sums_of_their_tests_with_and_without_the_slow_ones():
    seconds = measured(REPORT)
    assert seconds == {"test_a.py": (11.5, 11.5), "test_b.py": (30.0, 0.0), "gpu/test_c.py": (1.0, 1.0)}
    rows = [line for line in table(seconds).splitlines() if ".py |" in line]
    assert rows == ["| test_b.py | 30.0 | 0.0 |", "| test_a.py | 11.5 | 11.5 |", "| gpu/test_c.py | 1.0 | 1.0 |"]


def test_a_quick_file_above_the_limit_is_a_problem_until_it_is_marked_and_a_row_needs_its_file(tmp_path):
    page = table(measured(REPORT))
    (tmp_path / "test_a.py").write_text("import pytest\n")
    (tmp_path / "test_b.py").write_text("import pytest\n")
    slow, gone = problems(page, tmp_path)
    assert "test_a.py must be marked slow or take at most 10 seconds; it takes 11.5" in slow
    assert "gpu/test_c.py, which does not exist" in gone
    (tmp_path / "test_a.py").write_text("pytestmark = [pytest.mark.slow, pytest.mark.skipif(True)]\n")
    assert len([*problems(page, tmp_path)]) == 1
