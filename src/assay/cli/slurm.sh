
# A requeued job keeps its number and thus its run. Submitted with the name of a run, the job resumes that run.
run=${1:-$name-$SLURM_JOB_ID}
if [ -e "$runs/$run/config.toml" ]; then
    what=(--resume "$runs/$run")
    [ $# -gt 0 ] || what+=(--trust)  # this job started the run
else
    what=("$config" --name "$run")
fi

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((20000 + SLURM_JOB_ID % 12000)) # one per job, below the ephemeral ports of the system
say() { echo "$(date '+%F %T') $*"; }
say "start ${SLURM_RESTART_COUNT:-0} of $run on $SLURM_JOB_NODELIST, rendezvous at $address:$port"

# One torchrun per node. The training processes handle SIGTERM: they save and stop together. torchrun must ignore it,
# because it would allow them only 30 seconds. `assay.cli.slurm` is torchrun with exit codes: 143 after such a stop,
# 200 after an error. srun returns the highest exit code of all nodes.
srun --ntasks-per-node=1 --cpu-bind=none --export=ALL --kill-on-bad-exit=1 --open-mode=append --output="$node_log" \
    bash -c 'trap "" TERM; exec "$@"' node "$python" -m assay.cli.slurm \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$processes" --master-addr "$address" --master-port "$port" \
    -m assay train "${what[@]}" "${settings[@]}" &
step=$!

deadline= again=0
while kill -0 "$step" 2>/dev/null && [ "$SECONDS" -lt "${deadline:-$((SECONDS + 1))}" ]; do
    if [ "$warned" ] && [ "$SECONDS" -ge "$again" ]; then # repeated: starting processes miss the signal
        [ "$deadline" ] || say "the time limit is near: asking the run to save"
        scancel --signal=TERM "$SLURM_JOB_ID" # to its steps; srun itself would send SIGKILL
        deadline=${deadline:-$((SECONDS + patience))} again=$((SECONDS + 5))
    fi
    sleep 1
done
if kill -0 "$step" 2>/dev/null; then
    say "not saved in time"
    code=143
else
    wait "$step"
    code=$?
fi

# Only a run that was asked to stop is requeued, not after an error or a cancellation.
if [ "$code" -eq 143 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    say "requeued: $run will resume from its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
