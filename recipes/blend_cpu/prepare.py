"""Write two sources of documents as {"text": …} lines: the passages of a text between blank lines, and problems.

python recipes/blend_cpu/prepare.py --plays PLAYS.txt --gsm8k GSM8K.jsonl --output DIR
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path


def passages(text: str) -> Iterator[str]:
    """Return each passage between blank lines as a document."""
    return (part.strip() for part in re.split(r"\n\s*\n", text) if part.strip())


def problems(lines: Iterator[str]) -> Iterator[str]:
    """Return each {"question", "answer"} record as a document: the question, then the answer."""
    return (f"{record['question']}\n{record['answer']}" for record in map(json.loads, lines))


def write(texts: Iterator[str], path: Path) -> None:
    """Write one {"text": …} a line, and print their number."""
    documents = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join(documents) + "\n", encoding="utf-8")
    print(f"  {len(documents):,} documents in {path}")


def main() -> None:
    """Write shakespeare.jsonl and gsm8k.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("plays", "gsm8k", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    write(passages(options.plays.read_text(encoding="utf-8")), options.output / "shakespeare.jsonl")
    with options.gsm8k.open(encoding="utf-8") as lines:
        write(problems(lines), options.output / "gsm8k.jsonl")


if __name__ == "__main__":
    main()
