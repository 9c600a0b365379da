"""Capacity planning: simulate a cluster with the real scheduler and a model of step times.

trace        requests: synthetic, or from a file
hardware     data of devices and links
memory       memory of a rank, by the runner's own rules
roofline     step times from bytes, operations and messages
tables       kernel times from published measurements, in place of the roofline
calibration  step times fitted to measured steps
measure      the benchmark that a calibration is fitted to
simulator    engines in simulated time, with their real schedulers
counted      a fast engine that computes the totals of each step without a scheduler
report       latency and throughput as clients would see them
candidates   parallel layouts of a cluster, and the load that each can serve
"""
