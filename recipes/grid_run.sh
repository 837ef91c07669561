# Functions for grids of runs, which recipes source after small_run.sh: cells, one judgement for each seed, one table.
#
# A cell is a training run. JOBS of them run at a time; each leaves FOLDER/seed_N/CELL.done, which holds its command, and
# is then never run again. A cell that fails is named at the end, with its log, and the others are judged without it.

JOBS=${JOBS:-1}
SEEDS=${SEEDS:-1 2 3}
declare -A SHARES=([0]=none [0.5]=half [1.0]=all) # of the long records, by their names in cells
cells=() # every cell of the grid as seed_N/CELL
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # the cells in progress, if the grid is stopped

# tokenized SEED SHARE: tokenize chats and that share of the long records, unless it is done. Sets train.
tokenized() {
    train=$run/seed_$1/share_$2
    local sources="{chats:$chats,long:$long}" sample="{chats:1.0,long:$2}"
    if [[ "$2" == 0 ]]; then sources="{chats:$chats}" sample=null; fi
    if [[ -e "$train/report.json" ]]; then return; fi
    verl-ext tokenize "sources=$sources" "sample=$sample" "output_dir=$train" "model.path=$model" preview=0
}

# small_model SEED: make the model $model of 0.46M random weights, whose tokenizer is trained on chats and long records.
small_model() {
    verl-ext init-model model=tiny 'config={num_hidden_layers:2,hidden_size:128,intermediate_size:384}' "seed=$1" \
        "output_dir=$model" "tokenizer.train_on=[$chats,$long]" tokenizer.vocab_size=512 tokenizer.bos_token=null
}

# train_cell SEED CELL OVERRIDE …: start a cell's training run, when one of JOBS is free.
train_cell() {
    local cell=seed_$1/$2
    local words=("data.seed=$1" "trainer.default_local_dir=$run/$cell" "${@:3}")
    cells+=("$cell")
    if [[ -e "$run/$cell.done" ]]; then
        if [[ "$(<"$run/$cell.done")" != "${words[*]}" ]]; then
            echo "$cell was run with other options; give another FOLDER. There: $(<"$run/$cell.done")" >&2
            exit 2
        fi
        return
    fi
    while (($(jobs -rp | wc -l) >= JOBS)); do wait -n || true; done
    say "$cell"
    (
        trap 'kill $!' TERM
        verl-ext launch "${words[@]}" >"$run/$cell.log" 2>&1 &
        wait $! && printf '%s' "${words[*]}" >"$run/$cell.done"
    ) &
}

# judge_cells SEED OVERRIDE …: judge the cells of a seed that are done, unless they are judged already.
judge_cells() {
    local seed=seed_$1 models=() cell
    for cell in "${cells[@]}"; do
        if [[ "$cell" == "$seed"/* && -e "$run/$cell.done" ]]; then models+=("models.${cell#*/}=$run/$cell"); fi
    done
    if ((${#models[@]} == 0)); then return; fi
    if [[ -e "$run/$seed/judged/results.json" && "${models[*]}" == "$(cat "$run/$seed/judged.done" 2>/dev/null)" ]]; then
        return
    fi
    say "Judging ${#models[@]} cells of $seed."
    verl-ext judge "${models[@]}" "${@:2}" "output_dir=$run/$seed/judged" overwrite=true max_failed=1 >"$run/$seed/judged.log"
    printf '%s' "${models[*]}" >"$run/$seed/judged.done"
}

# show_grid SCORE BASE: print the table of a score by cell, and the differences to the cell BASE; name what failed.
show_grid() {
    local seed failed=() judged=() cell
    for seed in $SEEDS; do
        if [[ -e "$run/seed_$seed/judged/results.json" ]]; then judged+=("$run/seed_$seed/judged"); fi
    done
    for cell in "${cells[@]}"; do
        if [[ ! -e "$run/$cell.done" ]]; then failed+=("$cell: see $run/$cell.log"); fi
    done
    if ((${#judged[@]})); then
        verl-ext grid "judged=[$(IFS=,; echo "${judged[*]}")]" "score=$1" "base=$2" "output_dir=$run/table" overwrite=true
    fi
    if ((${#failed[@]})); then
        printf 'failed: %s\n' "${failed[@]}" >&2
        exit 1
    fi
}
