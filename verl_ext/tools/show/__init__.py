"""Views of data and runs: terminal, HTML file, or JSON."""
