#!/usr/bin/env bash
# The topology of a run from the environment, for the scripts of this folder that start one of its nodes:
# sets NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR, MASTER_PORT, LOCAL_ADDR and MAX_RESTARTS, or fails in one line.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/topology.sh" DEFAULT_PORT
#
# launch/node.sh has the table of names and defaults. On one node MASTER_PORT stays empty if nothing sets it.

fail() {
    echo "launch/$(basename "$0"): $1" >&2
    exit 2
}

# first_set DEFAULT NAME…: print the value of the first variable that is set and not empty
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
NODE_RANK=$(first_set "" NODE_RANK node_rank PET_NODE_RANK)
NPROC_PER_NODE=$(first_set "" NPROC_PER_NODE nproc_per_node PET_NPROC_PER_NODE)
MASTER_ADDR=$(first_set "" MASTER_ADDR master_ip PET_MASTER_ADDR)
MASTER_PORT=$(first_set "" MASTER_PORT master_port PET_MASTER_PORT)
# shellcheck disable=SC2034  # for the scripts that read this
LOCAL_ADDR=$(first_set "" LOCAL_ADDR local_addr PET_LOCAL_ADDR)
MAX_RESTARTS=$(first_set 0 MAX_RESTARTS max_restarts PET_MAX_RESTARTS)
NPROC_PER_NODE=${NPROC_PER_NODE:-$(count_devices)}

[[ "$NNODES" =~ ^[1-9][0-9]*$ ]] || fail "NNODES must be a whole number of at least 1; got '$NNODES'"
[[ "$NPROC_PER_NODE" =~ ^[1-9][0-9]*$ ]] ||
    fail "NPROC_PER_NODE must be a whole number of at least 1; got '$NPROC_PER_NODE'"
[[ "$MAX_RESTARTS" =~ ^(0|[1-9][0-9]*)$ ]] || fail "MAX_RESTARTS must be a whole number of at least 0; got '$MAX_RESTARTS'"
if [[ -n "$MASTER_PORT" ]] && { ! [[ "$MASTER_PORT" =~ ^[1-9][0-9]{0,4}$ ]] || ((MASTER_PORT > 65535)); }; then
    fail "MASTER_PORT must be a port, 1 to 65535; got '$MASTER_PORT'"
fi

if ((NNODES == 1)); then
    NODE_RANK=0
    MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
else
    [[ -n "$MASTER_ADDR" ]] || fail "MASTER_ADDR (or master_ip) must name the first node when NNODES=$NNODES; got nothing"
    if ! [[ "$NODE_RANK" =~ ^(0|[1-9][0-9]*)$ ]] || ((NODE_RANK >= NNODES)); then
        fail "NODE_RANK must be 0 to $((NNODES - 1)) when NNODES=$NNODES; got '$NODE_RANK'"
    fi
    MASTER_PORT=${MASTER_PORT:-$1}
fi
