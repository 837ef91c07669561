#!/usr/bin/env bash
# Two sources from your files: documents, a 10M-parameter model and its tokenizer, the index, training, report.
#
#   recipes/blend_cpu/run.sh PLAYS.txt GSM8K.jsonl [FOLDER [override …]]
#
# PLAYS.txt    a text whose parts are separated by blank lines
# GSM8K.jsonl  lines of {"question", "answer"}
# FOLDER       blend_cpu_run by default; a folder that this script made is reused. Overrides apply to the training run.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if (($# < 2)); then
    sed -n '/^#   recipes/s/^#   /usage: /p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
plays=$1 gsm8k=$2 folder=${3:-blend_cpu_run}
shift $(($# < 3 ? $# : 3))
source "$here/../small_run.sh"
open_run blend_cpu "$folder"

say "1/5  Documents."
python "$here/prepare.py" --plays "$plays" --gsm8k "$gsm8k" --output "$data"

say "2/5  A model from scratch, and a tokenizer trained on both sources."
verl-ext init-model model=small_10m "output_dir=$run/model" overwrite=true \
    "tokenizer.train_on=[$data/shakespeare.jsonl,$data/gsm8k.jsonl]"

say "3/5  The index: shakespeare.bin, .idx and gsm8k.bin, .idx."
verl-ext index "output_dir=$run/index" overwrite=true "model.path=$run/model" \
    "sources={shakespeare:$data/shakespeare.jsonl,gsm8k:$data/gsm8k.jsonl}"

say "4/5  Training on 2 ranks: 7 samples of 10 from the plays, 3 from the problems."
NPROC_PER_NODE=2 verl-ext launch recipe=blend_cpu \
    "data.blend=[[0.7,$run/index/shakespeare],[0.3,$run/index/gsm8k]]" "data.cache_dir=$run/cache" \
    "model.path=$run/model" "trainer.default_local_dir=$run/checkpoints" trainer.overwrite=true "$@"

say "5/5  Results."
show_run
say "Done. Everything is in $run"
