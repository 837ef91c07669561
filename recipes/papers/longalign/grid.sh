#!/usr/bin/env bash
# LongAlign's comparisons in one table: the share of long records × the loss, and packed, sorted and padded batches.
#
#   recipes/papers/longalign/grid.sh [FOLDER [override …]]
#
# FOLDER: longalign_grid by default. The same command continues a grid: a cell that is done is not run again.
# Overrides apply to every training run. SEEDS='1 2 3', JOBS=2 cells at a time, CELLS=all for the whole product.
# The small form generates its data, and a rule rates the answers. The full form is given a model, long records (as
# `verl-ext synthesize task=longalign` writes them), chats, LongBench-Chat's files and a judge:
#
#   START=MODEL LONG=SYNTHESIZED CHATS='chats/*.jsonl' CASES=test_cases.json SHOTS=few_shots.json \
#       BASE_URL=http://HOST:8000/v1 MODEL=JUDGE JOBS=1 recipes/papers/longalign/grid.sh FOLDER
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overrides=("${@:2}")
source "$here/../../small_run.sh"
source "$here/../../grid_run.sh"
open_run longalign_grid "${1:-longalign_grid}"

if [[ -n "${START:-}" ]]; then
    asked=()
    overrides=(recipe=longalign data.share_prefixes=false "${overrides[@]}")
    documents=8 # of a padded batch
else
    asked=(max_tokens=16 temperature=0)
    # Every cell trains on as many steps, whatever the share: it is the kind of records that differs.
    overrides=(recipe=longalign/small parallel=cpu data.share_prefixes=false data.max_tokens=640 data.train_batch_size=5
        data.micro_batch_size_per_gpu=5 trainer.total_epochs=100 trainer.total_training_steps=100 "${overrides[@]}")
    documents=20
    export NPROC_PER_NODE=1
fi

# data_of SEED: the data of a seed. Sets model, long, chats, cases and shots.
data_of() {
    local data=$run/seed_$1/data
    if [[ -n "${START:-}" ]]; then
        model=$START long=${LONG:?} chats=${CHATS:?} cases=${CASES:?} shots=${SHOTS:?}
        return
    fi
    model=$run/seed_$1/model long=$data/long.jsonl chats=$data/chats.jsonl
    cases=$data/cases.json shots=$data/few_shots.json
    if [[ -e "$model/config.json" ]]; then return; fi
    python "$here/grid_data.py" --output "$data" --seed "$1"
    small_model "$1"
}

for seed in $SEEDS; do
    data_of "$seed"
    for share in 0 0.5 1.0; do
        tokenized "$seed" "$share"
        for loss in pack token sequence longwriter; do
            for batches in packed sorted padded; do
                # Without CELLS=all only the last share and LongAlign's loss have all three kinds of batches.
                if [[ "${CELLS:-}" != all && $batches != packed && "$share $loss" != "1.0 sequence" ]]; then continue; fi
                case $batches in
                packed) how=() ;;
                sorted) how=(data.strategy=sorted_batch) ;;
                padded) how=(data.strategy=none data.pad_mode=right "data.train_batch_size=$documents") ;;
                esac
                train_cell "$seed" "${SHARES[$share]}_${loss}_$batches" "data.train_dir=$train" "model.path=$model" \
                    "${overrides[@]}" "loss=$loss" "${how[@]}"
            done
        done
    done
done
wait
open_server
for seed in $SEEDS; do
    data_of "$seed"
    judge_cells "$seed" task=longbench_chat "cases=$cases" "chat.shots=$shots" "${asked[@]}" \
        "judge.base_url=$server_url" "judge.model=$server_model"
done
show_grid rating none_sequence_packed
