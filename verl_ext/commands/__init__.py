"""The commands of `verl-ext`; command_line.py says how to write one."""
