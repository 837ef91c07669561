"""Text tokenised once into Megatron's indexed form: the command, and the same work inside a training process."""
