"""The judging of long answers, by rules and a judge model."""
