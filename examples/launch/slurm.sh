#!/bin/bash
# Train on several nodes under Slurm:  sbatch slurm.sh
# One agent per node; each starts one rank per GPU. A job that is preempted, or comes to its time limit, is warned two
# minutes before, saves on all ranks, and is put back into the queue; it then resumes by itself.
#SBATCH --job-name=penstock
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
set -u

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Change from here: the environment, the data, and the Plan (dp is nodes × GPUs per node).
source .venv/bin/activate
srun --kill-on-bad-exit=0 \
  penstock launch --procs 8 --nnodes "$SLURM_NNODES" --rdzv "$HEAD:29400" --rdzv-id "$SLURM_JOB_ID" -- \
  vit-b16 --data pack:/data/flowers.pack --plan "precision=O1 optimizer=fused micro_batch=64 dp=32" \
  --output "runs/$SLURM_JOB_NAME"
CODE=$?

# 75: stopped by a signal, and saved.
if [ "$CODE" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
