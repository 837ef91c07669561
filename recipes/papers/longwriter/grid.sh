#!/usr/bin/env bash
# LongWriter's comparison in one table: S_l by the length asked for, with and without long outputs, by loss.
#
#   recipes/papers/longwriter/grid.sh [FOLDER [override …]]
#
# FOLDER: longwriter_grid by default. The same command continues a grid: a cell that is done is not run again.
# Overrides apply to every training run. SEEDS='1 2 3', JOBS=2 cells at a time.
# The small form generates its data; lengths are counted. The full form is given a model, long outputs (as
# `verl-ext synthesize task=agentwrite` writes them), chats, and cases in LongWrite-Ruler's form:
#
#   START=MODEL LONG=SYNTHESIZED CHATS='chats/*.jsonl' CASES=longwrite_ruler.jsonl JOBS=1 recipes/papers/longwriter/grid.sh FOLDER
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overrides=("${@:2}")
source "$here/../../small_run.sh"
source "$here/../../grid_run.sh"
open_run longwriter_grid "${1:-longwriter_grid}"

if [[ -n "${START:-}" ]]; then
    asked=()
    overrides=(recipe=longwriter "${overrides[@]}")
else
    asked=(max_tokens=300 temperature=0)
    # Every cell trains on as many steps, whatever the share: it is the kind of records that differs.
    overrides=(recipe=longwriter/small parallel=cpu data.max_tokens=1024 data.train_batch_size=2
        data.micro_batch_size_per_gpu=2 trainer.total_epochs=100 trainer.total_training_steps=120 "${overrides[@]}")
    export NPROC_PER_NODE=1
fi

# data_of SEED: the data of a seed. Sets model, long, chats and cases.
data_of() {
    local data=$run/seed_$1/data
    if [[ -n "${START:-}" ]]; then
        model=$START long=${LONG:?} chats=${CHATS:?} cases=${CASES:?}
        return
    fi
    model=$run/seed_$1/model long=$data/long.jsonl chats=$data/short.jsonl cases=$data/cases.jsonl
    if [[ -e "$model/config.json" ]]; then return; fi
    python "$here/grid_data.py" --output "$data" --seed "$1"
    small_model "$1"
}

for seed in $SEEDS; do
    data_of "$seed"
    for share in 0 0.5 1.0; do
        tokenized "$seed" "$share"
        for loss in token sequence longwriter; do
            train_cell "$seed" "${SHARES[$share]}_$loss" "data.train_dir=$train" "model.path=$model" \
                "${overrides[@]}" "loss=$loss"
        done
    done
done
wait
for seed in $SEEDS; do
    data_of "$seed"
    judge_cells "$seed" task=longwrite_ruler "cases=$cases" "${asked[@]}"
done
show_grid S_l none_longwriter
