"""The README's two pictures: a document with its mask, and a run, as `verl-ext show` prints them.

python docs/make_pictures.py quickstart_run    # writes docs/document.svg and docs/run.svg
"""

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer
from verl_ext.tools.show.document import cells_of, document_text
from verl_ext.tools.show.documents import open_documents
from verl_ext.tools.show.run_tables import run_tables
from verl_ext.tools.show.runs import open_run

ROW, WIDTH = 3, 116  # of the quickstart, a short conversation; columns


def write_svg(path: Path, title: str, *parts: object) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for part in parts:
        console.print(part)
    console.print()  # else the picture ends on the last line's descenders
    text = console.export_svg(title=title, unique_id=path.stem)
    path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()), encoding="utf-8")


def main() -> None:
    run, docs = Path(sys.argv[1]), Path(__file__).parent
    documents = open_documents([str(run / "tokenised" / "train")])
    tokenizer = load_tokenizer(ModelOptions(str(run / "model")))
    category = documents.names[int(documents.categories[ROW])]
    facts = f"row {ROW}: {category}, {documents.lengths[ROW]:,} tokens, {documents.targets[ROW]:,} targets"
    document = document_text(cells_of(documents.row(ROW), tokenizer), in_colour=True)
    words = f"verl-ext show {run.name}/tokenised/train row={ROW}"
    write_svg(docs / "document.svg", words, Text(facts, "bold"), document)
    curves = run_tables([open_run(str(run / "checkpoints"))], WIDTH)
    write_svg(docs / "run.svg", f"verl-ext show {run.name}/checkpoints", *curves)


if __name__ == "__main__":
    main()
