"""The Hydra configuration of verl_ext, installed as the package ``verl_ext.conf``."""
