"""What the data commands share: command line, typed options, tokenizer, workers, output folder, progress bar.

Imports neither a command's package nor a dataset's.
"""
