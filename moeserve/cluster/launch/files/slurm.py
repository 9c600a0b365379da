"""A batch script of Slurm, which runs `moeserve launch --slurm`."""

import shlex

from moeserve.cluster.launch.files.deployment import Deployment


def slurm(it: Deployment) -> str:
    """Returns the script."""
    return f"""#!/bin/bash
# Save as moeserve.sbatch, add partition, GPUs and so on, and start it: sbatch moeserve.sbatch
# Let running requests finish and end it: scancel --batch --signal=TERM JOBID
#SBATCH --job-name=moeserve
#SBATCH --nodes={it.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=moeserve-%j.log
# The job lives on when a node fails; its part is started again once the node is back.
#SBATCH --no-kill
# Before the time limit, as at a stop.
#SBATCH --signal=B:TERM@{it.stop_s + 60}

# source /path/to/.venv/bin/activate
exec moeserve launch --slurm -- serve {shlex.join(it.words_for_all)}
"""
