"""The memory and time of a run on GPUs, predicted without one."""
