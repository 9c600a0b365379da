"""`moeserve launch`: start, watch and stop `moeserve serve` on all machines of a cluster.

The process on each machine is called its part (part.py). Parts are started over ssh, under Slurm,
by Ray, or as several processes on this machine. supervise.py has the policy; Kubernetes is
different, see kubernetes.py.
"""
