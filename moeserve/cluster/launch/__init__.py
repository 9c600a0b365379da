"""`moeserve launch`: starts, watches and stops the parts of all machines, over ssh, under Slurm, or
on this one.
"""
