# shellcheck shell=bash
# What the sbatch files share: preflight, start on all nodes, logs per rank, and going on after a signal or a failure.
#
#   megarl_prepare CONFIG [key=value ...]   checks the nodes; ends the job where they are not fit
#   megarl_train CONFIG [key=value ...]     trains until it is done, or requeues the job
#
# Settings, all of them environment variables:
#   MEGARL_HOME          checkout of megarl, on a file system that all nodes share (default: where sbatch was called)
#   MEGARL_PYTHON        default: of $MEGARL_HOME/.venv-gpu (make install-gpu), else of .venv, where there is one, else python
#   MEGARL_RANKS         processes of a node (default: its GPUs)
#   MEGARL_CONTAINER     image: a .sif file for apptainer, anything else for pyxis (srun --container-image); default: none.
#                        Pyxis unpacks a registry's image at each srun: use the .sqsh file that `enroot import` makes of it
#   MEGARL_MOUNTS        SOURCE:TARGET,... that the container sees beside $MEGARL_HOME, which it always does
#   MEGARL_LOGS          default: $MEGARL_HOME/slurm_logs/JOBID
#   MEGARL_LIMIT         seconds for each wait of the preflight (60)
#   MEGARL_DOWNLOAD      seconds that a node may take to download what the configuration names on the Hugging Face hub (0)
#   MEGARL_HOST_MEMORY, MEGARL_DISK, MEGARL_BANDWIDTH   what a node must have at least: GiB, GiB, GB/s (on
#                        GPUs what `megarl plan` says of memory and disk)
#   MEGARL_WAIT          seconds to wait for a job that still writes into run_dir (500; at 360 a silent one is taken for dead)
#   MEGARL_GRACE         seconds that the ranks have to save and leave after a signal (240; less than --signal gives)
#   MEGARL_RETRIES       failures in a row without a new checkpoint after which the job gives up (2)

: "${SLURM_JOB_ID:?source this file from an sbatch script}"
MEGARL_HOME=${MEGARL_HOME:-$SLURM_SUBMIT_DIR}
cd "$MEGARL_HOME" || exit 2
if [ -z "${MEGARL_PYTHON:-}" ]; then
    MEGARL_PYTHON=python
    for megarl_venv in .venv .venv-gpu; do # a container has a Python of its own
        [ ! -x "$megarl_venv/bin/python" ] || [ -n "${MEGARL_CONTAINER:-}" ] || MEGARL_PYTHON=$MEGARL_HOME/$megarl_venv/bin/python
    done
fi
MEGARL_RANKS=${MEGARL_RANKS:-${SLURM_GPUS_ON_NODE:-1}}
MEGARL_LOGS=${MEGARL_LOGS:-$MEGARL_HOME/slurm_logs/$SLURM_JOB_ID}
MEGARL_LIMIT=${MEGARL_LIMIT:-60}
export PYTHONPATH=$MEGARL_HOME${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
export MEGARL_HOME MEGARL_PYTHON MEGARL_RANKS

megarl_attempt=${SLURM_RESTART_COUNT:-0}
megarl_first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A port of the job's own, and the next one for the preflight: below those that systems give away by themselves (32768 and up), and below
# 22000 to 29999, where each SGLang engine takes one. A requeued job may find its last one still in use.
megarl_port=$((12000 + (SLURM_JOB_ID * 7 + megarl_attempt * 2) % 3998))
megarl_started=
megarl_signal=
mkdir -p "$MEGARL_LOGS"
# USR1 comes from Slurm before the time limit (--signal=B:USR1@N) and from whoever wants the job to move. TERM comes with scancel
# and with pre-emption, where Slurm itself decides whether the job is queued again.
trap 'megarl_pass USR1' USR1
trap 'megarl_pass TERM' TERM

megarl_say() { printf '[%s] %s\n' "$(date '+%F %T')" "$*"; }

# One process on each node, inside the container if there is one.
megarl_srun() {
    local flags=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1) prefix=()
    local mounts=$MEGARL_HOME:$MEGARL_HOME${MEGARL_MOUNTS:+,$MEGARL_MOUNTS}
    case ${MEGARL_CONTAINER:-} in
        '') ;;
        *.sif) prefix=(apptainer exec --nv --bind "$mounts" --pwd "$MEGARL_HOME" "$MEGARL_CONTAINER") ;;
        *) flags+=(--container-image="$MEGARL_CONTAINER" --container-mounts="$mounts" --container-workdir="$MEGARL_HOME") ;;
    esac
    "${MEGARL_SRUN:-srun}" "${flags[@]}" "${prefix[@]}" "$@"
}

# One process on one node, for what the whole job asks once; inside the container too, as the node's own Python may lack what megarl imports.
megarl_once() {
    if [ -n "${MEGARL_CONTAINER:-}" ]; then SLURM_JOB_NUM_NODES=1 megarl_srun "$@"; else "$@"; fi
}

megarl_prepare() {
    megarl_say "job $SLURM_JOB_ID, attempt $megarl_attempt, on $SLURM_JOB_NODELIST"
    # shellcheck disable=SC2016  # expanded on the node
    timeout --kill-after=10 $((MEGARL_LIMIT * 3 + 120 + ${MEGARL_DOWNLOAD:-0})) \
        "$BASH" -c "$(declare -f megarl_srun); megarl_srun \"\$@\"" - bash -c '
            exec "$MEGARL_PYTHON" -P -m megarl preflight "${@:8}" --node "$SLURM_NODEID" --nodes "$1" --ranks "$MEGARL_RANKS" \
                --host "$2" --port "$3" --limit "$4" --host-memory "$5" --disk "$6" --bandwidth "$7"' - \
        "$SLURM_JOB_NUM_NODES" "$megarl_first" "$((megarl_port + 1))" "$MEGARL_LIMIT" \
        "${MEGARL_HOST_MEMORY:-0}" "${MEGARL_DISK:-0}" "${MEGARL_BANDWIDTH:-0}" "$@"
    local code=$?
    [ "$code" -ne 124 ] || megarl_say "preflight: some node has not even started it (srun hangs, sinfo -R: ask for other nodes; or the container's image is still being fetched: give a .sqsh file; or a download takes longer: set MEGARL_DOWNLOAD)"
    if [ "$code" -ne 0 ]; then
        megarl_say "preflight failed: mend the nodes, or leave them out: sbatch --exclude=NODE ..."
        exit 2
    fi
}

megarl_train() {
    local run_dir before code
    run_dir=$(megarl_once "$MEGARL_PYTHON" -P -m megarl config show "$@" | sed -n 's/^run_dir: //p') || exit 2
    [ -n "$run_dir" ] || exit 2
    before=$(megarl_newest "$run_dir")
    [ -z "$megarl_signal" ] || megarl_stopped
    # torchrun dies of USR1 and leaves its ranks behind: it is ignored here, which ranks inherit and may change for themselves.
    # shellcheck disable=SC2016  # expanded on the node
    megarl_srun bash -c '
        trap "" USR1
        logs=$4/$SLURMD_NODENAME && mkdir -p "$logs" &&
        PYTHONSAFEPATH=1 exec "$MEGARL_PYTHON" -m torch.distributed.run --nnodes "$1" --node-rank "$SLURM_NODEID" --nproc-per-node "$MEGARL_RANKS" \
            --master-addr "$2" --master-port "$3" --log-dir "$logs" --redirects 3 --tee 0:3 -m megarl train --wait "$5" "${@:6}"' - \
        "$SLURM_JOB_NUM_NODES" "$megarl_first" "$megarl_port" "$MEGARL_LOGS/attempt-$megarl_attempt" "${MEGARL_WAIT:-500}" "$@" &
    megarl_started=$!
    megarl_wait
    code=$?
    if [ -n "$megarl_signal" ]; then
        megarl_stopped
    elif [ "$code" -ne 0 ]; then
        megarl_failed "$code" "$before" "$(megarl_newest "$run_dir")"
    fi
    megarl_say "trained: $run_dir (logs of each rank: $MEGARL_LOGS)"
}

# Hands a signal to the ranks; a second one changes nothing.
megarl_pass() {
    [ -z "$megarl_signal" ] || return 0
    megarl_signal=$1
    megarl_say "signal $1: the ranks have ${MEGARL_GRACE:-240} s to save and leave"
    scancel --signal="$1" "$SLURM_JOB_ID" || true # there may be no step yet
}

# Until srun has ended, and no longer than the grace after a signal; gives srun's exit code. Who is still there then is ended by Slurm,
# when the job is queued again.
megarl_wait() {
    local code deadline
    while :; do
        wait "$megarl_started"
        code=$?
        kill -0 "$megarl_started" 2>/dev/null || return $code
        [ -z "$megarl_signal" ] || break # a trap has cut the wait short
    done
    deadline=$((SECONDS + ${MEGARL_GRACE:-240}))
    while kill -0 "$megarl_started" 2>/dev/null; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            megarl_say "the ranks are still there: they are ended, and go on from the newest checkpoint"
            return 1
        fi
        sleep 0.5
    done
    wait "$megarl_started"
}

megarl_stopped() {
    if [ "$megarl_signal" = TERM ]; then
        megarl_say "ended by TERM: cancelled, or pre-empted (Slurm then queues the job again by itself)"
        exit 143
    fi
    megarl_requeue "after signal $megarl_signal"
}

# A rank that was killed, a node that was lost, a full disk: once more from the newest checkpoint, as long as there is progress.
megarl_failed() {
    local count=0
    megarl_say "training ended with exit code $1 (logs of each rank: $MEGARL_LOGS/attempt-$megarl_attempt)"
    if [ "$2" = "$3" ]; then count=$(($(cat "$MEGARL_LOGS/failures" 2>/dev/null || echo 0) + 1)); fi
    echo "$count" >"$MEGARL_LOGS/failures"
    if [ "$count" -ge "${MEGARL_RETRIES:-2}" ]; then
        megarl_say "no new checkpoint in $count attempts (the newest: ${3:-none}): given up"
        exit "$1"
    fi
    megarl_requeue "after a failure, newest checkpoint: ${3:-none}"
}

megarl_requeue() {
    megarl_say "requeue $1"
    # A node that was lost takes Slurm a while to notice, and Slurm then queues the job again itself; either way this script ends here.
    trap 'exit 1' TERM
    scontrol requeue "$SLURM_JOB_ID" || { megarl_say "cannot be queued again (sbatch --requeue?)"; exit 1; }
    sleep 60 &
    wait $!
    exit 1
}

# The newest complete checkpoint's name; nothing where there is none. A manifest is written last.
megarl_newest() {
    local manifests=("$1"/checkpoints/step-*/manifest.json)
    [ -e "${manifests[-1]}" ] && basename "$(dirname "${manifests[-1]}")"
    return 0
}
