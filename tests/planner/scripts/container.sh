#!/bin/bash
# torchrun on every node, in a container, with the flags in a here-document and in exported variables.
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
set -euxo pipefail

while getopts "d" option; do
    echo $option
done

export MASTER_PORT=6000 MODULE=megatron_2bw
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TP=${TP:-4} PP=2 RECOMPUTE="--recompute-activations"
WORLD=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))
((DP = WORLD / (TP * PP)))

size() {
    local TP=1
    echo "$WORLD GPUs"
}
size

sharing() {
    set -- "$@" --use-distributed-optimizer
    printf -v line '%s ' "$@"
    SHARING=$*
}
sharing --overlap-grad-reduce

read -r -d '' MODEL <<-EOF || true
	--num-layers 24 --hidden-size 2048 \
	--num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
EOF

RANK=0
export RUN="--micro-batch-size 2 --global-batch-size $((DP * 16)) --bf16 $SHARING"
cp -r "$PWD" /scratch
(RUN="--fp16"; export PP=8)

srun -l --container-image=/images/pytorch.sqsh --container-mounts "/data:/data,/scratch:/mnt" \
    --output="log_%j" --export=ALL,SCHEDULE=2bw bash -lc "
        cd /mnt
        export RANK=\$SLURM_PROCID
        torchrun --nnodes \$SLURM_NNODES --nproc_per_node \$SLURM_GPUS_ON_NODE --node_rank \$RANK \
            --master_addr $head --master_port \$MASTER_PORT -m \$MODULE pretrain_gpt.py \
            $MODEL \$RUN --tensor-model-parallel-size $TP --pipeline-model-parallel-size \$PP \
            --pipeline-schedule \$SCHEDULE --vocab-file vocab.json --merge-file merges.txt \$RECOMPUTE
    " 2>&1 | tee log.txt
