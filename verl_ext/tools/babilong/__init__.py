"""The command `verl-ext babilong`: bAbI stories hidden in background text.

bAbI: Weston et al., arXiv 1502.05698; BABILong: Kuratov et al., arXiv 2406.10149.
"""
