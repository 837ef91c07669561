"""Layers with a state over time, in packs: convolutions and recurrences."""

from verl_ext.layers.mixers import MIXERS, SCANS, UNAWARE, Mixer, install, mixers_of, torch_forms, unknown_mixers
from verl_ext.layers.pack import RunningPack, attach
