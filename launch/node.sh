#!/usr/bin/env bash
# One node of a training run: the one torchrun line, with the topology taken from the environment.
#
#   launch/node.sh recipe=quickstart data.train_dir=DIR model.path=MODEL              # this machine, every GPU of it
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=host0 launch/node.sh recipe=token_aware_pack …   # the same on each of 4 nodes
#   DRY_RUN=1 launch/node.sh …                                                        # print the line, start nothing
#
# variable         other names             default
# NNODES           nnodes, PET_NNODES      1
# NODE_RANK        PET_NODE_RANK           0 on one node; needed on several
# NPROC_PER_NODE   nproc_per_node, PET_…   CUDA_VISIBLE_DEVICES, else the GPUs nvidia-smi lists, else 1
# MASTER_ADDR      master_ip, PET_…        this machine on one node; needed on several
# MASTER_PORT      master_port, PET_…      a free port on one node; 29500 on several
#
# WORLD_SIZE and RANK are not read: they count processes for some schedulers and nodes for others.
# Every argument is an override of conf/sft.yaml and goes through unchanged.
set -euo pipefail

fail() {
    echo "launch/node.sh: $1" >&2
    exit 2
}

# first_set DEFAULT NAME…: the value of the first variable that is set and not empty
first_set() {
    local default=$1 name
    shift
    for name in "$@"; do
        if [[ -n "${!name:-}" ]]; then
            echo "${!name}"
            return
        fi
    done
    echo "$default"
}

count_devices() {
    local count=0
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        count=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]') || true
    elif command -v nvidia-smi >/dev/null; then
        count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
    fi
    echo $((count > 0 ? count : 1))
}

NNODES=$(first_set 1 NNODES nnodes PET_NNODES)
NODE_RANK=$(first_set "" NODE_RANK PET_NODE_RANK)
NPROC_PER_NODE=$(first_set "" NPROC_PER_NODE nproc_per_node PET_NPROC_PER_NODE)
MASTER_ADDR=$(first_set "" MASTER_ADDR master_ip PET_MASTER_ADDR)
MASTER_PORT=$(first_set "" MASTER_PORT master_port PET_MASTER_PORT)
NPROC_PER_NODE=${NPROC_PER_NODE:-$(count_devices)}

[[ "$NNODES" =~ ^[1-9][0-9]*$ ]] || fail "NNODES must be a whole number of at least 1; got '$NNODES'"
[[ "$NPROC_PER_NODE" =~ ^[1-9][0-9]*$ ]] ||
    fail "NPROC_PER_NODE must be a whole number of at least 1; got '$NPROC_PER_NODE'"

if ((NNODES == 1)) && [[ -z "$MASTER_PORT" ]]; then
    # A rendezvous of its own on a free port: two runs on one machine never meet.
    topology=(--standalone --local_addr=127.0.0.1)
elif ((NNODES == 1)); then
    topology=(--nnodes=1 --node_rank=0 "--master_addr=${MASTER_ADDR:-127.0.0.1}" "--master_port=$MASTER_PORT")
else
    [[ -n "$MASTER_ADDR" ]] || fail "MASTER_ADDR (or master_ip) must name the first node when NNODES=$NNODES; got nothing"
    if ! [[ "$NODE_RANK" =~ ^[0-9]+$ ]] || ((NODE_RANK >= NNODES)); then
        fail "NODE_RANK must be 0 to $((NNODES - 1)) when NNODES=$NNODES; got '$NODE_RANK'"
    fi
    topology=("--nnodes=$NNODES" "--node_rank=$NODE_RANK" "--master_addr=$MASTER_ADDR" "--master_port=${MASTER_PORT:-29500}")
fi

line=(torchrun "${topology[@]}" "--nproc_per_node=$NPROC_PER_NODE" -m verl_ext.fsdp_sft_trainer "$@")
if [[ "${DRY_RUN:-0}" != 0 ]]; then
    printf '%q ' "${line[@]}"
    echo
    exit 0
fi

command -v torchrun >/dev/null || fail "torchrun must be on PATH; activate the environment that verl-ext is installed in"
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # what torchrun sets, with a warning on every start
export NNODES # recipes may set the packs per step from it
exec "${line[@]}"
