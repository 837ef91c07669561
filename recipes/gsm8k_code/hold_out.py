"""Split files of records into a training part and a held-out part, written as jsonl.

    python recipes/gsm8k_code/hold_out.py --output DIR gsm8k=train.jsonl code=code.json

writes `gsm8k.train.jsonl`, `gsm8k.val.jsonl`, and so on. The choice of held-out records depends only on the seed and
on the number of records; both parts keep the file's order.
"""

import argparse
import json
import random
import sys
from pathlib import Path


def read(path: Path) -> list[dict]:
    """Return the records of a json list or of a jsonl file."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def write(path: Path, records: list[dict]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def hold_out(records: list[dict], count: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Return (training, held out), with `count` records held out."""
    if not 0 < count < len(records):
        raise ValueError(f"--val must be at least 1 and less than the {len(records)} records of each file; got {count}")
    chosen = set(random.Random(seed).sample(range(len(records)), count))
    training = [record for i, record in enumerate(records) if i not in chosen]
    return training, [records[i] for i in sorted(chosen)]


def source(text: str) -> tuple[str, Path]:
    """Parse `category=file` from the command line."""
    name, _, path = text.partition("=")
    if not name or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"a source must be CATEGORY=FILE with a file that exists; got {text}")
    return name, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=source, nargs="+", metavar="CATEGORY=FILE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--val", type=int, default=100, help="records to hold out of each file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, path in arguments.sources:
        try:
            training, held_out = hold_out(read(path), arguments.val, arguments.seed)
        except ValueError as error:
            sys.exit(f"hold_out.py: {path}: {error}")
        write(arguments.output / f"{name}.train.jsonl", training)
        write(arguments.output / f"{name}.val.jsonl", held_out)
        print(f"  {name:<10} {len(training):>6,} training and {len(held_out):>4,} held-out records")


if __name__ == "__main__":
    main()
