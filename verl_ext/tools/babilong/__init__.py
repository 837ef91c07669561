"""The command `verl-ext babilong`: BABILong samples of any size, which hide bAbI stories in background text.

bAbI: Weston et al., arXiv 1502.05698; BABILong: Kuratov et al., arXiv 2406.10149.
"""
