# Shell functions shared by the scripts that train. Sourced after lib/python.sh.

# text_data KIND FOLDER: a vocabulary and tokens for gpt or bert, of Python's standard library, as
# FOLDER/KIND.model and FOLDER/KIND_*.bin and .idx; what is there already stays.
text_data() {
    "$VENV/bin/python" "$ROOT/examples/prepare_corpus.py" --output "$2/corpus.jsonl"
    "$VENV/bin/python" -W ignore "$ROOT/examples/prepare_data.py" \
        --input "$2/corpus.jsonl" --output "$2" --model "$1" 2> >(grep -v "No CUDA runtime" >&2)
}

# Prints how many GPUs torch can use here. Those that it sees but cannot use, as behind a driver that is older than its
# CUDA, are none: torch warns of them, and the ranks would train on the CPU.
count_gpus() {
    "$VENV/bin/python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
}

# Without GPUs: one thread per process, and none of a GPU that is there but not wanted.
use_cpu() {
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
}

# With GPUs: memory that grows where it is; torch waits for the whole GPU before it looks for memory elsewhere.
use_gpus() {
    [ -n "${PYTORCH_ALLOC_CONF:-}" ] || export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
}

# train LOG TORCHRUN_FLAG... -- SCRIPT FLAG...: run it under the launcher; shows what matters, adds all to LOG.
train() {
    local log="$1" launcher=() signal="" failed=""
    shift
    while [ "$1" != "--" ]; do
        launcher+=("$1")
        shift
    done
    shift
    # Where all processes get a signal (Ctrl-C, the end of a job's time), the ranks may still save: this waits for
    # them, and then ends by it, so that a loop around this script does, too.
    trap 'signal=INT' INT
    trap 'signal=TERM' TERM
    "$VENV/bin/python" -m torch.distributed.run "${launcher[@]}" -m megatron_2bw "$@" \
        2>&1 | "$VENV/bin/python" "$ROOT/scripts/training_log.py" follow --append "$log" || failed=yes
    trap - INT TERM
    if [ -n "$failed" ]; then
        echo "error: training failed; its whole output is in $log" >&2
        [ -z "$signal" ] || kill -s "$signal" $$
        return 1
    fi
}
