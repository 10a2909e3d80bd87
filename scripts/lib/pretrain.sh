# The body of scripts/pretrain_gpt.sh and scripts/pretrain_bert.sh. Sourced after lib/python.sh and lib/training.sh.

# The value of a flag among $flags, or the second argument.
value_of() {
    local at value="$2"
    for ((at = 0; at < ${#flags[@]}; at++)); do
        case "${flags[at]}" in
        "$1") value="${flags[at + 1]:-}" ;;
        "$1="*) value="${flags[at]#*=}" ;;
        esac
    done
    echo "$value"
}

is_given() {
    [ -n "$(value_of "$1" "")" ]
}

# value_of a flag with a number of at least 1.
number_of() {
    local value
    value="$(value_of "$1" "$2")"
    if [[ ! "$value" =~ ^[1-9][0-9]*$ ]]; then
        echo "error: $1 ${value:-has no value}: give a whole number of at least 1" >&2
        return 1
    fi
    echo "$value"
}

# pretrain KIND FLAG...: train a model of that kind on this node's share of the ranks; see the scripts.
pretrain() {
    local kind="$1"
    shift
    local flags=("$@") defaults=() launcher tokens tokenizer ranks gpus stages microbatch batch tensor context replica
    local length without
    local data="${DATA:-$ROOT/quickstart/data}" nodes="${NUM_NODES:-1}" output="${OUTPUT:-}"
    if [ -z "$output" ]; then
        output="${DATA:+$DATA/$kind}" output="${output:-$ROOT/runs/$kind}"
    fi
    mkdir -p "$output"

    if [ "$kind" = gpt ]; then
        tokens="$data/gpt_document" tokenizer=GPTSentencePieceTokenizer
        defaults+=(--no-create-attention-mask-in-dataloader) # It is the causal one.
    else
        tokens="$data/bert_sentence" tokenizer=SentencePieceTokenizer
    fi
    if [ -z "${DATA:-}" ] && [ "$nodes" -eq 1 ]; then
        text_data "$kind" "$data"
    elif [ ! -e "$tokens.idx" ]; then
        echo "error: $tokens.idx is missing; make it with examples/prepare_data.py --model $kind --output $data" >&2
        return 1
    fi
    keep_vocabulary "$data/$kind.model" "$output"

    # Of flags that are given twice, the last one counts.
    length="$(value_of --seq-length 128)"
    defaults+=(--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length "$length" --max-position-embeddings "$length")
    gpus="$(count_gpus)"
    stages="$(number_of --pipeline-model-parallel-size 2)"
    microbatch="$(number_of --micro-batch-size 4)"
    tensor="$(number_of --tensor-model-parallel-size 1)"
    context="$(number_of --context-parallel-size 1)"
    if ! is_given --pipeline-model-parallel-size; then
        defaults+=(--pipeline-schedule 2bw)
    elif [ "$stages" -gt 1 ] && ! { is_given --micro-batch-size && is_given --global-batch-size; }; then
        defaults+=(--pipeline-schedule 2bw) # With all three, the planner means Megatron's where it prints no schedule.
    fi
    if ! is_given --pipeline-model-parallel-size && [ $((gpus % 2)) -ne 0 ]; then
        echo "warning: the default layout has two stages, for an even number of GPUs, not $gpus: training on the CPU." \
            "Give --pipeline-model-parallel-size to use them." >&2
        gpus=0
    fi
    replica=$((stages * tensor * context))
    ranks="${RANKS:-$gpus}"
    if [ "$gpus" -eq 0 ]; then
        use_cpu
        defaults+=(--num-workers 0) # Loading beside training would take a core from it.
        ranks="${RANKS:-$replica}"
    else
        use_gpus
        if [ $((tensor * context)) -gt 1 ]; then
            export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" # Megatron insists, before Blackwell.
        fi
    fi
    if [ $((nodes * ranks % replica)) -ne 0 ]; then
        echo "error: $((nodes * ranks)) processes are no multiple of $stages stages x $tensor tensor x $context context" \
            "parallel; change these, or set RANKS, the processes on each node" >&2
        return 1
    fi
    batch="$(number_of --global-batch-size $((stages * microbatch * nodes * ranks / replica)))" # A microbatch per stage.
    if [ $((batch % (microbatch * nodes * ranks / replica))) -ne 0 ]; then
        echo "error: --global-batch-size $batch is no multiple of $((nodes * ranks / replica)) replicas x microbatches of" \
            "$microbatch; change these, or if the flags are for fewer than $((nodes * ranks)) processes, set RANKS," \
            "the processes on each node" >&2
        return 1
    fi
    defaults+=(--pipeline-model-parallel-size "$stages" --micro-batch-size "$microbatch" --global-batch-size "$batch")
    if [ -z "$(value_of --train-iters "$(value_of --train-samples "")")" ]; then
        defaults+=(--train-iters 1000)
    fi
    if [ -z "$(value_of --lr-warmup-iters "$(value_of --lr-warmup-samples "")")" ]; then
        defaults+=(--lr-warmup-fraction 0.1)
    fi
    without="$("$VENV/bin/python" "$ROOT/scripts/kernels.py")"
    # shellcheck disable=SC2206 # Words.
    defaults+=($without)
    flags=("${defaults[@]}" "${flags[@]}")

    launcher=(--nproc-per-node "$ranks" --standalone)
    if [ "$nodes" -gt 1 ]; then
        launcher=(--nproc-per-node "$ranks" --nnodes "$nodes" --node-rank "$NODE_RANK"
            --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-6000}")
    fi
    echo "training on $nodes x $ranks processes by --pipeline-schedule $(value_of --pipeline-schedule megatron) with" \
        "--pipeline-model-parallel-size $stages; checkpoints and full log in $output"
    train "$output/train-${NODE_RANK:-0}.log" "${launcher[@]}" -- "$ROOT/examples/pretrain_$kind.py" \
        --data-path "$tokens" --split 95,5,0 --data-cache-path "$data/cache" \
        --tokenizer-type "$tokenizer" --tokenizer-model "$data/$kind.model" \
        --lr 5e-4 --min-lr 5e-5 --lr-decay-style cosine \
        --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
        --log-interval 10 --eval-interval 100 --eval-iters 5 \
        --save "$output/checkpoint" --load "$output/checkpoint" --save-interval 100 \
        --override-opt_param-scheduler "${flags[@]}"
}

# keep_vocabulary FILE FOLDER: the checkpoints in the folder belong to that vocabulary, or it is an error.
keep_vocabulary() {
    local kept="$2/vocabulary.cksum" sum
    sum="$(cksum <"$1")"
    if [ ! -s "$kept" ]; then
        # All at once: other nodes look at it in the same moment.
        echo "$sum" >"$kept.${HOSTNAME:-}-$BASHPID"
        mv -f "$kept.${HOSTNAME:-}-$BASHPID" "$kept"
    elif [ "$sum" != "$(cat "$kept")" ]; then
        echo "error: $2 belongs to another vocabulary than $1: set OUTPUT to another folder, or delete it" >&2
        return 1
    fi
}
