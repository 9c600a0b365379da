"""The benchmarks of the command line. Flags and JSON keys are those of `vllm bench`."""
