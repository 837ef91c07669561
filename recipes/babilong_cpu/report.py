"""The recipe's table: answers with and without memory, over seeds and lengths, beside what guessing would give.

python recipes/babilong_cpu/report.py --run babilong_cpu_run
"""

import argparse
import json
import re
from pathlib import Path
from statistics import mean

from verl_ext.commands.babilong.stories import PLACES, VERBS

MOVE = re.compile(rf"(\w+) (?:{'|'.join(VERBS['move'])}) the ({'|'.join(PLACES)})\.")


def guesses(file: Path) -> dict[str, float]:
    """Expected accuracy of answering without looking at who is asked for: the last place named, one of the actors'
    last places, any place."""
    records = json.loads(file.read_text(encoding="utf-8"))
    last = held = 0.0
    for record in records:
        facts = MOVE.findall(record["input"])
        places = list(dict(facts).values())
        last += facts[-1][1] == record["target"]
        held += places.count(record["target"]) / len(places)
    return {"the last place": last / len(records), "some actor's place": held / len(records), "any": 1 / len(PLACES)}


def metrics(run: Path, name: str) -> dict[str, float]:
    """The last validation of a run."""
    lines = (run / name / "metrics.jsonl").read_text().splitlines()
    return next(data for data in (json.loads(line)["data"] for line in reversed(lines)) if "val/accuracy" in data)


def spread(values: list[float]) -> str:
    """Mean and range in percent."""
    return f"{100 * mean(values):.0f} ({100 * min(values):.0f} to {100 * max(values):.0f})"


def table(run: Path, seeds: list[str], sizes: list[str]) -> str:
    """Markdown: a row for each kind of model, a column for each length."""
    lengths = " | ".join(f"{size} tokens" for size in sizes)
    lines = [
        f"| answers right, in %: mean (range) over {len(seeds)} seeds | {lengths} |",
        "|---|" + "---|" * len(sizes),
    ]
    for kind, title in (("memory", "with memory"), ("tokens", "with memory tokens"), ("plain", "without")):
        if kind == "tokens" and not (run / f"tokens_{seeds[0]}").is_dir():
            continue
        runs = [metrics(run, f"{kind}_{seed}") for seed in seeds]
        for metric, how in (("accuracy", "generated"), ("exact_match", "teacher-forced")):
            cells = [spread([result[f"val/qa1_{size}_{metric}"] for result in runs]) for size in sizes]
            lines.append(f"| {title}, {how} | {' | '.join(cells)} |")
    expected = [guesses(run / "val" / "qa1" / f"{size}.json") for size in sizes]
    for name in expected[0]:
        lines.append(f"| guessing: {name} | {' | '.join(f'{100 * cell[name]:.0f}' for cell in expected)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table and write it beside the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    run = parser.parse_args().run
    seeds = sorted(path.name.removeprefix("memory_") for path in run.glob("memory_*") if path.is_dir())
    sizes = sorted((path.stem for path in (run / "val" / "qa1").glob("*.json")), key=int)
    text = table(run, seeds, sizes)
    print(text)
    (run / "table.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
