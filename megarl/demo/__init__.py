"""The tasks that `megarl demo` and `megarl ablate` make from a seed: data, tokenizer and an untrained
model."""
