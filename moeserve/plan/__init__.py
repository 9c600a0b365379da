"""What a cluster would do before there is one: the real scheduler in simulated time, and a roofline
for its steps.

trace      requests: synthetic, or from a file
hardware   devices and links as data
memory     what a rank has to keep, by the runner's own rules
roofline   seconds of a step from bytes, operations and messages; tables: from measured kernels
calibration seconds of a step from measured steps
simulator  schedulers and the clock; counted: engines whose steps are sums
report     what clients would see
candidates the layouts that a number of devices allows, and which is best
"""
