#!/usr/bin/env bash
# One node of a job on SkyPilot or Kubeflow, which start this script on all nodes: preflight, ranks, and a new attempt after a failure.
#
#   node.sh CONFIG [key=value ...]
#
# Settings, environment variables as in slurm/common.sh:
#   MEGARL_HOME       checkout of megarl (default: the one that this file is in)
#   MEGARL_PYTHON     default: python, which is the image's (docker/Dockerfile)
#   MEGARL_RANKS      processes of a node (default: its GPUs)
#   MEGARL_LOGS       default: $MEGARL_HOME/node_logs
#   MEGARL_PORT       of the first node, and the next one for the preflight (SkyPilot: 29400; Kubeflow's runtime sets its own)
#   MEGARL_LIMIT      seconds for each wait of the preflight (900: another node may still be fetching the image)
#   MEGARL_HOST_MEMORY, MEGARL_DISK, MEGARL_BANDWIDTH   least values for the preflight: GiB, GiB, GB/s
#   MEGARL_WAIT       seconds to wait for a job that still writes into run_dir (500)
#   MEGARL_GRACE      seconds that the ranks have to save and leave after TERM or USR1 (25; Kubernetes kills after 30 by default)
#   MEGARL_RETRIES    failures in a row without a new checkpoint after which the job gives up (2)
set -u
MEGARL_HOME=${MEGARL_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
cd "$MEGARL_HOME" || exit 2
MEGARL_PYTHON=${MEGARL_PYTHON:-python}
export PYTHONPATH=$MEGARL_HOME${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
signal=
running=

say() { printf '[%s] %s\n' "$(date '+%F %T')" "$*"; }

# SkyPilot sets SKYPILOT_*. Kubeflow's runtime for torch sets PET_*, the defaults of torchrun's options.
if [ -n "${SKYPILOT_NODE_IPS:-}" ]; then
    nodes=$(wc -l <<<"$SKYPILOT_NODE_IPS")
    node=$SKYPILOT_NODE_RANK
    first=$(head -n 1 <<<"$SKYPILOT_NODE_IPS")
    ranks=${MEGARL_RANKS:-${SKYPILOT_NUM_GPUS_PER_NODE:-1}}
    port=${MEGARL_PORT:-29400}
elif [ -n "${PET_MASTER_ADDR:-}" ]; then
    nodes=${PET_NNODES:-1}
    node=${PET_NODE_RANK:-0}
    first=$PET_MASTER_ADDR
    ranks=${MEGARL_RANKS:-${PET_NPROC_PER_NODE:-1}}
    port=${MEGARL_PORT:-${PET_MASTER_PORT:-29400}}
else
    echo "node.sh: SKYPILOT_NODE_IPS and PET_MASTER_ADDR: neither is set (start it with tools/launch.py; on one machine use megarl train)" >&2
    exit 2
fi
[ "$ranks" != 0 ] || ranks=1
logs=${MEGARL_LOGS:-$MEGARL_HOME/node_logs}/node-$node
mkdir -p "$logs" || exit 2

preflight() {
    "$MEGARL_PYTHON" -P -m megarl preflight "$@" --node "$node" --nodes "$nodes" --ranks "$ranks" --host "$first" --port $((port + 1)) \
        --limit "${MEGARL_LIMIT:-900}" --host-memory "${MEGARL_HOST_MEMORY:-0}" --disk "${MEGARL_DISK:-0}" --bandwidth "${MEGARL_BANDWIDTH:-0}"
}

# torchrun dies of USR1 and leaves its ranks behind: it ignores the signal, which ranks inherit and may change for themselves.
train() {
    (
        trap '' USR1
        PYTHONSAFEPATH=1 exec "$MEGARL_PYTHON" -m torch.distributed.run --nnodes "$nodes" --node-rank "$node" --nproc-per-node "$ranks" \
            --master-addr "$first" --master-port "$port" --log-dir "$logs/attempt-$attempt" --redirects 3 --tee 0:3 \
            -m megarl train --wait "${MEGARL_WAIT:-500}" "$@"
    ) &
    running=$!
    wait_for_end
}

# Passes a signal on to the ranks, torchrun's children in sessions of their own. A second signal changes nothing.
pass() {
    [ -z "$signal" ] || return 0
    signal=$1
    [ -n "$running" ] || exit 143
    say "signal $1: the ranks have ${MEGARL_GRACE:-25} s to save and leave"
    cat "/proc/$running"/task/*/children 2>/dev/null | xargs -rn 1 kill -USR1 2>/dev/null
}
trap 'pass TERM' TERM
trap 'pass USR1' USR1

# Waits for torchrun, after a signal for the grace at most, and returns its exit code.
wait_for_end() {
    local code deadline
    while :; do
        wait "$running"
        code=$?
        kill -0 "$running" 2>/dev/null || return $code
        [ -z "$signal" ] || break # a trap has cut the wait short
    done
    deadline=$((SECONDS + ${MEGARL_GRACE:-25}))
    while kill -0 "$running" 2>/dev/null; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            say "the ranks are still there: they are ended, and continue from the newest checkpoint"
            kill -TERM "$running"
            break
        fi
        sleep 0.5
    done
    wait "$running"
}

# The newest complete checkpoint's name; nothing where there is none. A manifest is written last.
newest() {
    local manifests=("$run_dir"/checkpoints/step-*/manifest.json)
    [ -e "${manifests[-1]}" ] && basename "$(dirname "${manifests[-1]}")"
    return 0
}

run_dir=$("$MEGARL_PYTHON" -P -m megarl config show "$@" | sed -n 's/^run_dir: //p')
[ -n "$run_dir" ] || exit 2
failures=0
for ((attempt = 0; ; attempt++)); do
    say "node $node of $nodes, attempt $attempt, $ranks ranks, first node $first"
    preflight "$@" || { say "preflight failed on node $node"; exit 2; }
    before=$(newest)
    [ -z "$signal" ] || exit 143
    train "$@"
    code=$?
    running=
    if [ -n "$signal" ]; then
        say "ended by signal $signal: the same job continues from the newest checkpoint"
        exit 143
    elif [ "$code" -eq 0 ]; then
        say "trained: $run_dir"
        exit 0
    fi
    say "training ended with exit code $code (logs of each rank: $logs/attempt-$attempt)"
    if [ "$before" = "$(newest)" ]; then failures=$((failures + 1)); else failures=0; fi
    if [ "$failures" -ge "${MEGARL_RETRIES:-2}" ]; then
        say "no new checkpoint in $failures attempts (the newest: ${before:-none}): given up"
        exit "$code"
    fi
done
