"""Write tokenized documents without words, of log-uniform lengths, on which a run can be planned before there is data.

    python recipes/plan_data.py FOLDER SHORTEST LONGEST DOCUMENTS [pairs]

The last third of each document is targets; with `pairs` it is the preferred or the rejected answer to the same prompt.
The same words write the same documents.
"""

import json
import sys
from pathlib import Path

import numpy as np
from datasets import Dataset


def main(folder: Path, shortest: int, longest: int, documents: int, kind: str = "documents") -> None:
    """Write the folder."""
    rng = np.random.default_rng(0)
    rows = []
    for length in np.exp(rng.uniform(np.log(shortest), np.log(longest), documents)).astype(int):
        ids = rng.integers(0, 100_000, length).astype(np.int32)
        mask = (np.arange(length) >= length - length // 3).astype(np.int8)
        row = {"input_ids": ids, "loss_mask": mask, "category_ids": mask.astype(np.int32), "length": length}
        if kind == "pairs":
            other = np.where(mask == 1, rng.integers(0, 100_000, length), ids).astype(np.int32)
            first = {"unit": np.int32(2), "answer": np.int8(1), "pair_weight": np.float32(1)}
            second = {"unit": np.int32(0), "answer": np.int8(-1), "pair_weight": np.float32(1)}
            rows += [row | first, row | second | {"input_ids": other}]
        else:
            rows.append(row)
    Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]}).save_to_disk(str(folder))
    (folder / "categories.json").write_text(json.dumps({"1": "chats"}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), *sys.argv[5:])
