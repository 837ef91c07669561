"""Validation perplexity of each source over a run: a table, and perplexity.png.

python recipes/blend_cpu/report.py --metrics metrics.jsonl --output DIR
"""

import argparse
import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import pandas as pd


def perplexities(metrics: Path) -> pd.DataFrame:
    """A row for each validation, by step; a column for each source."""
    rows = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found = {
            match[1]: value
            for key, value in record["data"].items()
            if (match := re.fullmatch(r"val/(.+)_perplexity", key))
        }
        if found:
            rows[record["step"]] = found
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step")


def main() -> None:
    """Print the table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    frame = perplexities(options.metrics)
    print(frame.to_string(float_format="{:,.1f}".format))
    axes = frame.plot(marker="o", logy=True, figsize=(7, 4), grid=True, ylabel="validation perplexity")
    axes.figure.savefig(options.output / "perplexity.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
