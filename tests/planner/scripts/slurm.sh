#!/bin/bash
#SBATCH --job-name=bert --nodes=4 --exclusive
#SBATCH --ntasks-per-node=8

DIR=`pwd`
DATETIME=`date +'date_%y-%m-%d_time_%H-%M-%S'`
mkdir -p $DIR/logs

DATASET=${DATASET:-"/data/a text/b"}

options=" \
	--tensor-model-parallel-size 2 \
	--pipeline-model-parallel-size 4 \
        --num-layers 24 \
        --hidden-size 1024 \
        --num-attention-heads 16 \
        --seq-length 512 \
        --max-position-embeddings 512 \
	--micro-batch-size 4 \
	--global-batch-size=256 \
        --tokenizer-type BertWordPieceLowerCase \
        --data-path ${DATASET} \
	--vocab-file <a file> \
	--fp16 \
	--recompute-activations \
        --pipeline-schedule dapple \
        --use-distributed-optimizer "

run_cmd="python -u -m megatron_2bw ${DIR}/pretrain_bert.py $@ ${options}"

echo ${run_cmd}
srun -l \
     --output=$DIR/logs/%x_%j_$DATETIME.log sh -c "${run_cmd}" 2>&1 | tee $DIR/log

set +x
