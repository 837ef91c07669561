"""The Hydra configuration of verl_ext, installed as the package ``verl_ext.conf``.

Importing it, as Hydra does to read from ``pkg://verl_ext.conf``, registers the options that its files build on.
"""

from verl_ext.config.schema import register

register()
