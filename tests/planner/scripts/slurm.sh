#!/bin/bash
#SBATCH --job-name=bert --nodes=4 --exclusive
#SBATCH --ntasks-per-node=8

here=`dirname $0`
today=`date +%F`
corpora=${CORPORA:-"/data/a b"}

flags=" \
	--num-layers 24 --hidden-size 1024 \
        --num-attention-heads 16 \
        --seq-length 512 --max-position-embeddings 512 \
	--tensor-model-parallel-size 2 \
	--pipeline-model-parallel-size 4 \
	--micro-batch-size 4 \
	--global-batch-size=256 \
        --tokenizer-type BertWordPieceLowerCase \
	--vocab-file <a file> \
        --data-path ${corpora} \
	--fp16 --recompute-activations \
        --pipeline-schedule dapple \
        --use-distributed-optimizer "

command="python -m megatron_2bw ${here}/pretrain_bert.py $@ ${flags}"

echo ${command}
srun --label --output=$here/$today.log sh -c "${command}" 2>&1 | tee $here/log
