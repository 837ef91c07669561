"""How a run starts on a node: its topology, torchrun or Ray as a child process, and requests to stop."""
