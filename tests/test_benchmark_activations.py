"""The cases of benchmarks/activation_memory.py compute the same; no timing is asserted."""

import json
import sys

import pytest

from benchmarks import activation_memory

pytestmark = pytest.mark.slow


def test_every_case_has_the_loss_and_gradients_of_plain_layers():
    cells = [activation_memory.measure(case, 24, 16, 48, 2, 5) for case in activation_memory.CASES]
    activation_memory.check_equal(cells)
    assert "checkpoints+tiles+host" in activation_memory.table(cells)


def test_cells_are_printed_and_written(monkeypatch, tmp_path, capsys):
    output = tmp_path / "activations.json"
    sizes = ["--tokens", "24", "--hidden", "16", "--intermediate", "48", "--layers", "1", "--cases", "tiles"]
    monkeypatch.setattr(sys, "argv", ["activation_memory.py", *sizes, "--output", str(output)])
    monkeypatch.setattr(activation_memory, "in_own_process", lambda _, *cell: activation_memory.measure(*cell))  # quick
    activation_memory.main()
    (cell,) = json.loads(output.read_text())
    assert (cell["case"], cell["tokens"]) == ("tiles", 24)
    assert "24  tiles" in capsys.readouterr().out


def test_cases_that_differ_are_no_result():
    cells = [{"case": name, "tokens": 8, "loss": loss, "gradient": 1.0} for name, loss in (("a", 1), ("b", 2))]
    with pytest.raises(ValueError, match="b and a differ in loss"):
        activation_memory.check_equal(cells)
