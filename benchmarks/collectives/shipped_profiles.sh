#!/usr/bin/env bash
# Measures all profiles that profiles/data ships, into the folder $1. Every command can be interrupted and repeated; it
# measures only what its file lacks. The shipped files were measured with the same commands, in several calls on several
# machines with 4 x H200 and on one H100. This script has not been run as a whole.
#
#   benchmarks/collectives/shipped_profiles.sh OUT          on 4 GPUs joined by NVLink
#   benchmarks/collectives/shipped_profiles.sh OUT alone    on one GPU, with the step that a run on 4 kept in OUT/step
set -euo pipefail
out=${1:?folder for the profiles}
mkdir -p "$out/step"
name() { # the GPU's name as in file names, such as h200
    nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | awk '{print tolower($2)}'
}
gpu=$(name)
step8="--preset llama-8b --layers 4 --mesh dp=1,tp=4 --microbatches 4"
step25="--preset llama-25b --layers 4 --mesh dp=1,tp=4 --microbatches 4"

if [ "${2:-}" = alone ]; then
    dhelix profile "$out/step/default/step.hlo.pb" --nopairs --out "$out/$gpu-nvlink.json"
    exit
fi
nvlink="--out $out/$gpu-nvlink.json"
dhelix profile $step8 $nvlink --settings default,connections1 --bases llama-8b,phi-moe --keep "$out/step"
dhelix profile $step25 $nvlink --settings default,connections1 --bases llama-25b
dhelix profile $step8 $nvlink --settings connections1 --interleave
dhelix profile $step8 $nvlink --settings command-buffers,copy-engine,copy-engine1,user-buffers
dhelix profile --collectives $nvlink --settings default,copy-engine,copy-engine1,user-buffers
p2p="--link no-p2p --out $out/$gpu-no-p2p.json"
dhelix profile $step8 $p2p --settings default,connections1
dhelix profile $step8 $p2p --settings small-buffers --interleave
dhelix profile --preset llama-8b --layers 4 --mesh dp=2,tp=2 --microbatches 4 $p2p --settings small-buffers --interleave
dhelix profile --collectives $p2p --settings default,small-buffers
dhelix profile --collectives --link two-nodes --settings default,sockets --out "$out/$gpu-two-nodes.json"
python -m dhelix.runtime.compiler.autotune_results "$out/$gpu.autotune.pbtxt" "$out/$gpu-nvlink.autotune.pbtxt" "$out/$gpu-no-p2p.autotune.pbtxt"
