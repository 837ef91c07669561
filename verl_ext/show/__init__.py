"""What is trained on and what a run did, for people: in a terminal, as one HTML file, or as JSON."""
