"""Show what a recipe's mixture draws from your folders, without a GPU or a model: the table that the run prints.

    python recipes/papers/glm_long/plan.py recipe=glm_long/stage1_128k data.train_dir=DIR data.mixture.scale=0.01

takes the overrides of the training command; overrides that do not concern data have no effect.
"""

import sys

from verl_ext.config.compose import compose
from verl_ext.data import SFTDataSet
from verl_ext.data.packs.mixture import mixture_notices, mixture_table


def main() -> None:
    try:
        data = compose(sys.argv[1:]).data
        dataset = SFTDataSet(data.get("train_dir"), config=data)
    except ValueError as error:
        sys.exit(f"plan.py: {error}")
    print(mixture_table(map(vars, dataset.mixture_report)))
    tokens, packs = int(dataset.plan().pack_sums(dataset.spans.length).sum()), len(dataset)
    fill = tokens / (packs * data.max_tokens)
    print(f"\n{tokens:,} tokens in {packs:,} packs of {data.max_tokens:,}, {fill:.1%} full")
    for notice in mixture_notices(dataset.mixture_report):
        print(f"* {notice}")


if __name__ == "__main__":
    main()
