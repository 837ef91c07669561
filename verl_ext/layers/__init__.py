"""Layers that carry a state over time, in packs: short convolutions, gated delta nets, Mamba, lightning attention."""

from verl_ext.layers.mixers import MIXERS, SCANS, Mixer, install, mixers_of, unknown_mixers
from verl_ext.layers.pack import RunningPack, attach
