"""The verl engines; imports none, because importing verl takes seconds."""
