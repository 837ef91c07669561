"""The commands of `verl-ext`; verl_ext/__main__.py lists them, command_line.py says how to write one."""
