"""The judging of long answers: benchmarks of understanding and of writing, by rules and by a judge model."""
