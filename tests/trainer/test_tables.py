"""Tables as lines of text, and cells by row and column."""

from verl_ext.tables import aligned, as_text, pivot


def test_words_stand_left_and_numbers_right_and_nothing_is_read_as_markup():
    rows = [{"name": "[red]a[/red] :smile:", "n": "1,000", "": "x" * 300}, {"name": "你好", "n": "2", "": ""}]
    assert aligned(rows, left=["name", ""]).splitlines() == [
        "name                      n",
        f"[red]a[/red] :smile:  1,000  {'x' * 300}",
        "你好                      2",
    ]


def test_cells_by_row_and_column_keep_their_order_and_gaps():
    cells = {("b", "y"): "1", ("a", "x"): "[2, 3]", ("b", "x"): "4"}
    assert as_text(pivot("", cells, columns=["x", "z"], missing="-")).splitlines() == [
        "        x  z  y",
        "b       4  -  1",
        "a  [2, 3]  -  -",
    ]
