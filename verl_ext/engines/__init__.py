"""verl engines of this project. Importing this imports none of them: verl takes seconds."""
