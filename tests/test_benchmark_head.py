"""The heads of benchmarks/head_memory.py compute the same; no timing is asserted."""

import json
import sys

import pytest

from benchmarks import head_memory

pytestmark = pytest.mark.slow

HEADS = ["plain", "targets", "fused", "verl"]


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_every_head_has_the_loss_and_gradient_of_plain_logits(share):
    cells = [head_memory.measure(head, 24, share, 16, 300, 1) for head in HEADS]
    head_memory.check_equal(cells)
    assert all(cell["loss"] == pytest.approx(cells[0]["loss"], rel=1e-5) for cell in cells)


def test_cells_are_printed_and_written(monkeypatch, tmp_path, capsys):
    output = tmp_path / "head.json"
    sizes = ["--tokens", "24", "--targets", "1.0", "--hidden", "16", "--vocabulary", "300"]
    monkeypatch.setattr(sys, "argv", ["head_memory.py", *sizes, "--heads", "fused", "--output", str(output)])
    head_memory.main()
    (cell,) = json.loads(output.read_text())
    assert (cell["head"], cell["tokens"]) == ("fused", 24)
    assert "100%  fused" in capsys.readouterr().out


def test_heads_that_differ_are_no_result():
    cells = [
        {"head": name, "tokens": 8, "targets": 1.0, "loss": loss, "gradient": 1.0}
        for name, loss in (("a", 1), ("b", 2))
    ]
    with pytest.raises(ValueError, match="a and b differ in loss"):
        head_memory.check_equal(cells)
