"""The verl engines of this project. This package imports none of them, because importing verl takes seconds."""
