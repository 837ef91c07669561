"""Views of training data and of runs: in a terminal, as one HTML file, or as JSON."""
