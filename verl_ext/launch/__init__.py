"""The start of a run on a node, and requests to stop."""
